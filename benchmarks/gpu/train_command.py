"""Row `train`: `rlpack train` with its default recipe, from its start to the report, as a user runs it."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.figures import Figure, Setup

ROOT = Path(__file__).resolve().parents[2]
# Less than the row's deadline.
TIMEOUT_S = 800.0


def measure(setup: Setup) -> Iterator[Figure]:
    """Yield the exit code, and the times of the last step's phases."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        overrides = [f"run_dir={run_dir}", "trainer.steps=3", "evaluation.every=3", "checkpoint.every=3"]
        if setup.device == "cuda":
            overrides += ["placement=one_gpu", "actor.precision=bf16", "model=small", "sft_warmup.steps=50"]
        if setup.tiny:
            overrides = [f"run_dir={run_dir}", "experiment=smoke"]
        command = [sys.executable, "-m", "rlpack", "train", *overrides]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        yield Figure(
            "exit code of rlpack train",
            f"{done.returncode}" if done.returncode == 0 else f"{done.returncode}: {last_line(done.stderr)}",
            "0",
            done.returncode == 0,
        )
        if done.returncode:
            return
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
        records = [json.loads(line) for line in text.splitlines()]
        last = [record for record in records if record["phase"] == "train"][-1]
    for name in sorted(last):
        if name.startswith("time/"):
            yield Figure(f"{name.removeprefix('time/').removesuffix('_s')}, last step", f"{last[name]:.3f} s")


def last_line(text: str) -> str:
    """Return the last line that isn't empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
