#!/bin/bash
# A run on nodes that Slurm gives: a Ray cluster of their own, and `rlpack train` on it.
#
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh run_dir=/shared/mine trainer.steps=80
#
# What follows the script's name are overrides of `rlpack train`; run_dir has to be absolute, on storage that all nodes
# share. Submitted again as it was, it goes on from its last checkpoint. Options of sbatch's command line win over those
# below. Secrets: export them before sbatch, or put files on the nodes, and name them in job.secret_names.
#
#SBATCH --job-name=rlpack
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail

if [[ " $* " != *" run_dir=/"* ]]; then
    echo "deploy/slurm.sh: give run_dir=/…, an absolute path on storage that all nodes share" >&2
    exit 2
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000))
cpus=${SLURM_CPUS_PER_TASK:-1} gpus=${SLURM_GPUS_ON_NODE:-0}
export SRUN_CPUS_PER_TASK=$cpus # srun doesn't take it over from sbatch

# Nodes are reached by everybody on the cluster's network, so Ray asks for a token; its file is its owner's alone.
# The folder has to be seen by all nodes, as a home directory is.
token=$(mktemp "${RLPACK_TOKEN_DIR:-$HOME}/.rlpack-$SLURM_JOB_ID-XXXXXX")
python -c 'import secrets; print(secrets.token_hex(32))' > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token RAY_USAGE_STATS_ENABLED=0
# Reward functions are ended by their keeper, which cleans up after them; Ray would end it first.
export RAY_kill_child_processes_on_worker_exit=false

steps=()
driver=
end() {
    for process in $driver "${steps[@]}"; do
        kill -TERM "$process" 2> /dev/null || true
    done
    wait
    rm -f "$token"
}
trap end EXIT

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cpus" --num-gpus="$gpus" \
    --include-dashboard=false --block &
steps+=($!)
if ((${#nodes[@]} > 1)); then
    srun --overlap --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --exclude="$head" \
        bash -c 'for try in $(seq 60); do
            python -c "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)" "$1" "$2" && break
            sleep 2
        done 2> /dev/null
        exec ray start --address="$1:$2" --num-cpus="$3" --num-gpus="$4" --block' \
        start "$address" "$port" "$cpus" "$gpus" &
    steps+=($!)
fi

# The run itself refuses a cluster that is too small, so it has to be whole before.
python - "$address:$port" "${#nodes[@]}" << 'WAIT'
import logging, sys, time
import ray

address, wanted, deadline = sys.argv[1], int(sys.argv[2]), time.monotonic() + 300
while True:
    try:
        ray.init(address=address, logging_level=logging.ERROR)
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except (ConnectionError, ValueError, RuntimeError) as error:
        alive, reason = 0, f": {error}"
    else:
        reason = ""
    if alive >= wanted:
        break
    if time.monotonic() > deadline:
        sys.exit(f"deploy/slurm.sh: {alive} of {wanted} nodes joined {address} within 300 s{reason}")
    time.sleep(2)
WAIT

python -m rlpack train resume=auto "$@" "placement.address=$address:$port" &
driver=$!
# Slurm sends SIGTERM five minutes before the time is up: the run finishes its step, saves and ends with 130.
told=
trap 'told=yes; kill -TERM "$driver" 2> /dev/null || true' TERM
wait "$driver" && code=0 || code=$?
if [[ $told ]]; then # that wait was cut short by the signal; this one isn't
    wait "$driver" && code=0 || code=$?
fi
driver=
exit "$code"
