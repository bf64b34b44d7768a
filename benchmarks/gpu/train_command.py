"""Row `train`: `rlpack train` with its default recipe, from its start to the report, as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.gpu.figures import Figure, Setup

ROOT = Path(__file__).resolve().parents[2]
# The command ends before the row does, so that what it has done by then is reported.
DEADLINE = "BENCH_DEADLINE_S"
SHARE = 0.85


def measure(setup: Setup) -> Iterator[Figure]:
    """Yield the exit code, how long the roles took to start, and the times of the last step's phases."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, errors = Path(folder, "run"), Path(folder, "errors")
        overrides = [f"run_dir={run_dir}", "trainer.steps=3", "evaluation.every=3", "checkpoint.every=1000"]
        # Evaluation would otherwise take most of the time, and a run that hangs would wait longer than the row.
        overrides += ["data.generator.validation_size=32", "evaluation.samples=1", "placement.start_timeout_s=120"]
        if setup.device == "cuda":
            overrides += ["placement=one_gpu", "actor.precision=bf16", "model=small", "sft_warmup.steps=50"]
        if setup.tiny:
            overrides = [f"run_dir={run_dir}", "experiment=smoke"]
        code = exit_code([sys.executable, "-m", "rlpack", "train", *overrides], errors)
        reason = "" if code == 0 else f": {last_line(errors.read_text(encoding='utf-8'))}"
        shown = "none, ended at its deadline" if code is None else f"{code}{reason}"
        yield Figure("exit code of rlpack train", shown, "0", code == 0)
        log = run_dir / "run.log"
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        if started := re.search(r"roles are ready after ([0-9.]+ s)", text):
            yield Figure("roles ready after", started[1])
        path = run_dir / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        phases = Counter(record["phase"] for record in records)
        yield Figure("records", ", ".join(f"{name} {count}" for name, count in phases.items()) or "none")
        if code != 0:
            yield Figure("last lines of run.log", " / ".join(text.splitlines()[-5:]) or "none")
            return
    last = [record for record in records if record["phase"] == "train"][-1]
    for name in sorted(last):
        if name.startswith("time/"):
            yield Figure(f"{name.removeprefix('time/').removesuffix('_s')}, last step", f"{last[name]:.3f} s")


def exit_code(command: list[str], errors: Path) -> int | None:
    """Run a command to its end, its errors in a file; None if it was killed at the deadline, with its descendants."""
    passed = time.time() - psutil.Process().create_time()
    limit = max(1.0, SHARE * float(os.environ.get(DEADLINE, "600")) - passed)
    with errors.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # it ends Ray
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1 * limit)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.1)


def last_line(text: str) -> str:
    """Return the last line that isn't empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
