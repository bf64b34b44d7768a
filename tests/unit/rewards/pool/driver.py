"""A driver with secrets that runs hostile functions, one after the other; prints what became of each as JSON.

python -m tests.unit.rewards.pool.driver SPECIFICATION SECRET    with the secret in WANDB_API_KEY, too
"""

import atexit
import json
import os
import resource
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from rlpack.rewards.pool.call_queue import FunctionSpec, PoolSettings
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.pool.pool import RewardPool

CREDENTIALS = (
    ".netrc", ".ray/auth_token", ".ssh/id_rsa", ".aws/credentials", ".config/gcloud/credentials.db", ".kube/config",
    ".docker/config.json", ".cache/huggingface/token", ".git-credentials", ".bashrc", ".profile", ".zshenv", ".viminfo",
    ".local/share/jupyter/runtime/kernel.json", ".m2/settings.xml", ".gem/credentials", ".terraformrc",
    ".local/share/fish/fish_history", ".local/share/uv/credentials/store.toml", ".streamlit/secrets.toml",
    ".vnc/passwd",
)  # fmt: skip
HOSTILE = "tests.unit.rewards.hostile_by_name:call"


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def state(process: psutil.Process) -> object:
    """What a hostile function could change of a process."""
    limits = [process.rlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)]
    return process.nice(), process.cpu_affinity(), limits


def main() -> None:
    specification, secret = json.loads(sys.argv[1]), sys.argv[2]
    home, elsewhere = Path(os.environ["HOME"]), Path(os.environ["TMPDIR"])
    assert os.environ["WANDB_API_KEY"] == secret
    os.environ["HF_TOKEN_PATH"] = str(elsewhere / "keys" / "hub")
    secrets = [write(home / name, secret) for name in CREDENTIALS] + [write(elsewhere / "keys" / "hub", secret)]
    run_dir = elsewhere / "runs" / "mine"
    secrets += [write(run_dir / name, secret) for name in ("config.yaml", "checkpoints/state.json")]
    outside = write(elsewhere / "data" / "rows.jsonl", "rows")
    shared = write(Path("/dev/shm") / f"rlpack-test-{os.getpid()}", secret)
    atexit.register(os.unlink, shared)
    local = socket.create_server(str(elsewhere / "socket"), family=socket.AF_UNIX)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0rlpack-test-{os.getpid()}")
    abstract.listen()
    files = {
        "driver": os.getpid(), "secrets": secrets, "run_dir": str(run_dir), "outside": outside, "shared": shared,
        "socket": str(elsewhere / "socket"), "abstract": f"rlpack-test-{os.getpid()}", "late": str(home / ".pypirc"),
        "strict": specification["strict"], "home": str(home),
    }  # fmt: skip
    functions = {
        "short": FunctionSpec("tests.unit.rewards.hostile_by_name:call", {"files": files}, specification["short_s"]),
        "long": FunctionSpec("tests.unit.rewards.hostile_by_name:call", {"files": files}, specification["long_s"]),
    }
    found: dict[str, object] = {}
    for kind, names in specification["functions"].items():
        settings = PoolSettings(
            processes=1,
            strict=specification["strict"],
            hidden=(run_dir,),
            limits=Limits(memory_gb=1.0, file_bytes=8 << 20, scratch_bytes=32 << 20),
        )
        pool = RewardPool({kind: functions[kind]}, settings)
        pool.wait()
        write(home / ".pypirc", secret)
        processes = [psutil.Process(), *psutil.Process().children()]
        before = [state(process) for process in processes]
        for name in names:
            found[name] = run(pool, kind, name)
        assert [state(process) for process in processes] == before
        pool.close()
        assert psutil.Process().children(recursive=True) == []
    assert Path(outside).read_text() == "rows"
    assert Path(outside).stat().st_mode & 0o777 == 0o644
    assert list(elsewhere.glob("rlpack-rewards-*")) == []
    local.close()
    sys.stdout.write(json.dumps(found))


def run(pool: RewardPool, kind: str, name: str) -> object:
    """Run one function in a fresh process, and wait until the pool has its size again."""
    began = time.monotonic()
    (result,) = pool.run({"prompt": ["p"], "completion": [name]}, 1)[kind]
    took_s = time.monotonic() - began
    pool.wait(timeout_s=10.0)
    refill_s = time.monotonic() - began - took_s
    while len(psutil.Process().children(recursive=True)) > 2:  # files are deleted in the background
        assert time.monotonic() - began < took_s + 20.0, psutil.Process().children(recursive=True)
        pool.wait(timeout_s=1.0)
    pool.run({"prompt": ["p"], "completion": ["aborts"]}, 1)  # so that nothing of it is left
    pool.wait(timeout_s=10.0)
    return {**asdict(result), "took_s": took_s, "refill_s": refill_s}


if __name__ == "__main__":
    main()
