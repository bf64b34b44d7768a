#!/bin/bash
# A run under Slurm: starts a Ray cluster on the allocated nodes, and runs `rlpack train` on it.
#
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh run_dir=/shared/mine trainer.steps=80
#
# The arguments after the script's name are overrides of `rlpack train`. run_dir has to be an absolute path on storage
# that all nodes share. Submitting the same command again resumes from the last checkpoint. Options on sbatch's command
# line override those below. Secrets: export them before sbatch, or put files on the nodes, and list them in
# job.secret_names.
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
export SRUN_CPUS_PER_TASK=$cpus # srun doesn't inherit it from sbatch

# Anyone on the cluster's network can reach the nodes, so Ray requires a token, in a file that only its owner can read.
# Its directory has to be shared by all nodes, like a home directory.
token=$(mktemp "${RLPACK_TOKEN_DIR:-$HOME}/.rlpack-$SLURM_JOB_ID-XXXXXX")
python -c 'import secrets; print(secrets.token_hex(32))' > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token RAY_USAGE_STATS_ENABLED=0
# Keep Ray from killing the supervisor of the reward processes before it has cleaned up.
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

# The run refuses a cluster that is too small, so wait until all nodes have joined.
python - "$address:$port" "${#nodes[@]}" << 'WAIT'
import logging, sys, time
import ray

address, num_nodes, deadline = sys.argv[1], int(sys.argv[2]), time.monotonic() + 300
while True:
    try:
        ray.init(address=address, logging_level=logging.ERROR)
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except (ConnectionError, ValueError, RuntimeError) as error:
        alive, reason = 0, f": {error}"
    else:
        reason = ""
    if alive >= num_nodes:
        break
    if time.monotonic() > deadline:
        sys.exit(f"deploy/slurm.sh: {alive} of {num_nodes} nodes joined {address} within 300 s{reason}")
    time.sleep(2)
WAIT

python -P -m rlpack train resume=auto "$@" "placement.address=$address:$port" &
driver=$!
# Slurm sends SIGTERM five minutes before the time limit: the run finishes its step, saves, and exits with 130.
interrupted=
trap 'interrupted=yes; kill -TERM "$driver" 2> /dev/null || true' TERM
wait "$driver" && code=0 || code=$?
if [[ $interrupted ]]; then # the signal interrupted the first wait
    wait "$driver" && code=0 || code=$?
fi
driver=
exit "$code"
