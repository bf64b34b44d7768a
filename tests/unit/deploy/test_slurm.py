"""The Slurm script: its syntax, its sbatch options, and what it starts, with stand-ins for Slurm's commands."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "slurm.sh"
# sbatch's long options, as `man sbatch` of Slurm 24.05 lists those that a script like this one has a use for.
OPTIONS = {
    *("account", "array", "begin", "chdir", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency"),
    *("error", "exclude", "exclusive", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "mem"),
    *("mem-per-cpu", "mem-per-gpu", "nice", "nodelist", "nodes", "no-requeue", "ntasks", "ntasks-per-node"),
    *("open-mode", "output", "partition", "qos", "requeue", "reservation", "signal", "switches", "time", "wait"),
}
# Each does what its name says to this script, and notes how it was called.
STAND_INS = {
    "scontrol": 'printf "nodeA\\nnodeB\\nnodeC\\n"',
    "srun": """
while [[ $1 == --* ]]; do shift; done
if [[ $1 == hostname ]]; then echo 10.0.0.1; exit; fi
exec sleep 60
""",
    "python": """
if [[ $1 == -c ]]; then echo the-token; exit; fi
if [[ $1 == - ]]; then cat > /dev/null; exit; fi
# The nodes start at the same time; the run's end would otherwise overtake them on a busy machine.
for try in {1..200}; do [[ $(grep -c "ray start" "$CALLS") -ge 2 ]] && break; read -rt 0.05 <> <(:); done
[[ $* == *seed=2* ]] || exit "${CODE:-0}"
trap 'exit 130' TERM
echo ready >> "$CALLS"
sleep 60 & wait
""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job of three nodes."""
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{name} $* token=$RAY_AUTH_TOKEN_PATH" >> "$CALLS"\n{text}\n')
        path.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "RLPACK_TOKEN_DIR": str(tmp_path),
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[A-C]",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_GPUS_ON_NODE": "4",
    }


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_bash_can_read_it():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, check=True).stderr == ""


def test_its_options_are_sbatchs_and_stand_before_the_first_command():
    lines = SCRIPT.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    found = {match[1]: match[3] for line in options if (match := re.fullmatch(r"#SBATCH --([a-z-]+)(=(\S+))?", line))}
    assert len(found) == len(options)
    assert set(found) <= OPTIONS
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(number for number, line in enumerate(lines) if line.startswith("#SBATCH")) < first
    assert re.fullmatch(r"\d+:\d\d:\d\d", found["time"] or "")
    assert re.fullmatch(r"B:TERM@\d+", found["signal"] or "")


def test_it_starts_a_head_the_other_nodes_and_the_run_and_ends_as_the_run_does(slurm, tmp_path):
    done = run(slurm | {"CODE": "3"}, "run_dir=/shared/mine", "data.prompt_column=a b")
    assert (done.returncode, done.stderr) == (3, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    (head,) = [call for call in calls if "ray start --head" in call]
    assert "--nodelist=nodeA" in head
    assert "--node-ip-address=10.0.0.1 --port=24711 --num-cpus=8 --num-gpus=4" in head
    (others,) = [call for call in calls if "--exclude=nodeA" in call]
    assert "--nodes=2 --ntasks=2" in others
    (train,) = [call for call in calls if "rlpack train" in call]
    assert "train resume=auto run_dir=/shared/mine data.prompt_column=a b placement.address=10.0.0.1:24711" in train


def test_the_token_is_in_a_file_that_is_given_to_all_and_gone_at_the_end(slurm, tmp_path):
    assert run(slurm, "run_dir=/shared/mine").returncode == 0
    calls = (tmp_path / "calls").read_text()
    assert "the-token" not in calls
    started = [call for call in calls.splitlines() if "ray start" in call or "rlpack train" in call]
    assert len(started) == 3
    assert all(re.search(rf"token={tmp_path}/\.rlpack-4711-\w+$", call) for call in started)
    assert list(tmp_path.glob(".rlpack-*")) == []


def test_slurms_signal_reaches_the_run_whose_code_it_ends_with(slurm, tmp_path):
    with subprocess.Popen(["bash", str(SCRIPT), "run_dir=/shared/mine", "seed=2"], env=os.environ | slurm) as process:
        deadline = time.monotonic() + 30
        while "ready" not in ((tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 130


def test_a_relative_run_dir_is_refused_before_anything_starts(slurm, tmp_path):
    for words in ((), ("run_dir=mine",)):
        done = run(slurm, *words)
        assert done.returncode == 2
        assert "give run_dir=/…, an absolute path" in done.stderr
    assert not (tmp_path / "calls").exists()
