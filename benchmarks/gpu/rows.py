"""The rows of the GPU benchmark, in the order of their run, and how one runs in a separate process."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.figures import Figure, Setup

ROOT = Path(__file__).resolve().parents[2]
# Begins the lines of a row's output that hold a figure as JSON.
_MARK = "figure: "


@dataclass(frozen=True)
class Row:
    """One row of the benchmark.

    Attributes:
        title: what it measures.
        function: `module:function` in this package, which yields figures.
        deadline_s: seconds after which the row is ended and reported as failed.
        needs: packages that not every machine with PyTorch and transformers has.
    """

    title: str
    function: str
    deadline_s: float
    needs: tuple[str, ...] = ("numba", "peft", "pydantic")


ROWS = {
    "kernels": Row("packed attention kernels", "attention_kernels:measure", 300, ()),
    "checks": Row("isolation and equality of each architecture", "model_checks:measure", 900),
    "logprobs": Row("chunked log-prob head", "logprob_head:measure", 300, ()),
    "update": Row("packed GRPO update of 1.5 B parameters", "packed_update:measure_update", 900),
    "packing": Row("packed against padded rows", "packed_update:measure_packing", 900),
    "memory": Row("estimate of a dry run against the measured peak", "dry_run_memory:measure", 900),
    "grpo": Row("GRPO steps in one process", "grpo_step:measure", 600),
    "train": Row(
        "the command rlpack train",
        "train_command:measure",
        900,
        ("hydra", "numba", "peft", "psutil", "pydantic", "ray"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a row measured.

    Attributes:
        figures: in order, also those before a failure.
        failure: why the row did not end; empty if it did.
    """

    figures: tuple[Figure, ...]
    failure: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether the row ended and kept all of its bars."""
        return not self.failure and all(figure.kept is not False for figure in self.figures)


def figures_of(name: str, setup: Setup) -> Iterator[Figure]:
    """Measure a row in this process."""
    module, _, function = ROWS[name].function.partition(":")
    yield from getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(setup)


def print_figures(name: str, setup: Setup) -> None:
    """Measure a row in this process, and print each figure at once for `run_row`."""
    for figure in figures_of(name, setup):
        print(_MARK + json.dumps(asdict(figure)), flush=True)


def run_row(name: str, setup: Setup, deadline_s: float | None = None) -> Outcome:
    """Measure a row in a separate process, which is killed with its descendants at the deadline."""
    row = ROWS[name]
    if missing := [package for package in row.needs if find_spec(package) is None]:
        return Outcome((), f"not measured: it needs {', '.join(missing)}")
    limit = row.deadline_s if deadline_s is None else deadline_s
    command = [sys.executable, "-m", "benchmarks.gpu", "--measure", name, "--device", setup.device]
    command += ["--tiny"] * setup.tiny
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    environment["BENCH_DEADLINE_S"] = f"{limit:g}"  # of `train_command`
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=errors,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        failure = ""
        try:
            if process.wait(limit):
                failure = f"failed with exit code {process.returncode}: "
        except subprocess.TimeoutExpired:
            failure = f"ended at its deadline of {limit:g} s"
        finally:
            _kill_session(process)
        output.seek(0)
        errors.seek(0)
        if failure.endswith(": "):
            failure += _reason(errors.read())
        lines = output.read().splitlines()
    found = [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
    return Outcome(tuple(Figure(**fields) for fields in found), failure)


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a process and of those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def _reason(errors: str) -> str:
    """Return the line of a traceback that names the error, else the last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if line.removeprefix("[rank0]:").strip().partition(":")[0].endswith("Error")]
    return (named or lines or ["no message"])[-1].removeprefix("[rank0]:").strip()
