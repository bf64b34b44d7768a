"""Run `rlpack train` with a plan of faults, and find out what came of it."""

import fcntl
import json
import multiprocessing
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import psutil
import torch
from safetensors.torch import load_file

from rlpack.observe.run import Run
from rlpack.observe.run_dir import LOCK
from tests.end_to_end.commands import MARK, ROOT, Command, _run_command, records, without_times
from tests.faults.faulty_roles import CLASSES, FOLDER, ask_again_soon
from tests.faults.injection import CLUSTER, install
from tests.faults.table import Case
from tests.fork_server import environment, fork_context
from tests.forked_workers import ADDRESS

DEADLINE_S = 150.0
# Deadline of a call: all roles of a pool wait for the same two processes.
CALL_S = {"own pools": 10.0, "one pool": 20.0}
# After the end of a run, nothing of it is left by then.
GRACE_S = 10.0
SETTINGS = (
    "experiment=smoke",
    "sft_warmup.steps=0",
    "trainer.mini_batch_size=4",
    "trainer.updates_per_batch=2",
    "data.generator.train_size=64",
    "data.generator.validation_size=2",
    "rollout.max_new_tokens=8",
    "algorithm.kl_coef=0.05",
    "evaluation.every=1",
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "logger.samples=0",
    "actor.isolation_check=false",
    "reward.timeout_s=3",
    "reward.batch_timeout_s=6",
    "placement.start_timeout_s=60",
    *(f"roles.{role}.target=tests.faults.faulty_roles:{name}" for role, name in CLASSES.items()),
)
# rlpack lets waiting workers import the classes of built-in roles only.
PRELOADED = "rlpack.distributed.imports_without_gc,tests.faults.faulty_roles"
POOLS = {"rollout": "engines", "reference": "frozen", "reward": "rewards", "judge": "judges"}


def settings(layout: str, steps: int) -> tuple[str, ...]:
    """Return the overrides of a run."""
    own = [f"placement.roles.{role}={pool}" for role, pool in POOLS.items()]
    own += [f"placement.pools.{pool}.ranks=1" for pool in POOLS.values()]
    own += [f"placement.pools.{pool}.cpus_per_rank=0.2" for pool in POOLS.values()]
    few = ["placement.pools.main.ranks=2", "placement.pools.main.cpus_per_rank=0.5"]
    few.append(f"placement.call_timeout_s={CALL_S[layout]:g}")
    return (*SETTINGS, *few, *(own if layout == "own pools" else []), f"trainer.steps={steps}")


@dataclass
class Finding:
    """What came of a run with faults.

    Attributes:
        outcome: repeated, unchanged, resumed, error, or why it is none of them.
        seconds: from the fault to the end of what followed: the restart, the error, or the run.
        text: the error.
    """

    outcome: str
    seconds: float = 0.0
    text: str = ""
    restarts: dict[str, float] = field(default_factory=dict)


@contextmanager
def started(
    folder: Path,
    plan: Sequence[dict[str, Any]],
    overrides: Sequence[str],
    access: Mapping[str, str] = MappingProxyType({}),
    workers: str | None = None,
) -> Iterator[Command]:
    """Start a run with a plan of faults; nothing of it outlives the block.

    Args:
        folder: for the run.
        plan: the faults.
        overrides: of `rlpack train`.
        access: the environment that a cluster asks for. Ray reads it once, as it is imported: so such a run has a new
            process, and not one of the fork server's.
        workers: the folder of the servers that fork Ray's workers; None for workers that Ray starts.
    """
    (folder / "orders").mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    variables = {
        **environment(),
        **({} if workers is None else {ADDRESS: workers}),
        **access,
        "PYTHONPATH": str(ROOT),
        MARK: mark,
        "WANDB_SILENT": "true",
        FOLDER: str(folder),
        "OMP_NUM_THREADS": "1",
        "RAY_preload_python_modules": PRELOADED,
    }
    words = ["train", f"run_dir={folder / 'run'}", *overrides]
    context = multiprocessing.get_context("spawn") if access else fork_context()
    process = context.Process(
        target=_run, args=(folder, words, [str(ROOT), *sys.path, str(folder)], variables, mark, list(plan))
    )
    with patch.dict(os.environ, access):
        process.start()
    command = Command(folder, folder / "run", process, mark)
    try:
        yield command
    finally:
        for left in command.processes():
            left.kill()
        process.join()


def _run(folder: Path, words: list[str], places: list[str], variables: dict[str, str], mark: str, plan: Any) -> None:
    if plan:
        install(folder, plan)
    ask_again_soon()
    with patch.object(Run, "_report"):  # drawing it takes a second
        _run_command(folder, words, places, variables, mark, log_monitor=ADDRESS not in variables)


def fired(folder: Path) -> list[dict[str, Any]]:
    """Return the faults that happened, in order."""
    path = folder / "fired.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """Return what of the records depends neither on the clock nor on restarts."""
    own = ("faults/", "store/", "rollout/repeated_rows")
    return [
        {name: value for name, value in without_times(record).items() if not name.startswith(own)}
        for record in records(run_dir)
    ]


def is_same(run_dir: Path, undisturbed: Path) -> bool:
    """Return whether two runs have the same records and weights, bit for bit."""
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (run_dir, undisturbed))
    return (
        figures(run_dir) == figures(undisturbed)
        and weights.keys() == others.keys()
        and all(torch.equal(weights[name], others[name]) for name in others)
    )


def restarts_of(run_dir: Path) -> dict[str, float]:
    """Return the restarts of each role, over all steps."""
    total: dict[str, float] = {}
    for record in records(run_dir):
        for name, count in record.items():
            if name.startswith("faults/restarts/"):
                role = name.removeprefix("faults/restarts/")
                total[role] = total.get(role, 0.0) + count
    return total


def wait(command: Command, is_stopped: bool, deadline_s: float = DEADLINE_S) -> tuple[int | None, float]:
    """Return the exit code, and when the end was known: the error was printed, or the process ended."""
    said = None
    end = time.time() + deadline_s
    assert command.process is not None
    while time.time() < end:
        if said is None and is_stopped and fired(command.folder) and _is_stopped(command.process.pid):
            command.process.kill()  # as a person does
        if said is None and "Error" in _text(command):
            said = time.time()
        command.process.join(0.1)
        if command.process.exitcode is not None:
            return command.process.exitcode, said or time.time()
    return None, time.time()


def _is_stopped(pid: int | None) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _text(command: Command) -> str:
    try:
        return command.err
    except FileNotFoundError:
        return ""


def left_of(command: Command) -> str | None:
    """Return what is left of a run some seconds after its end, None if nothing is."""
    end = time.monotonic() + GRACE_S
    while (left := _left_of(command)) is not None and time.monotonic() < end:
        time.sleep(0.1)
    return left


def _left_of(command: Command) -> str | None:
    """Return what is left of a run now.

    The run's placement groups are those that its GCS has, so none is left once nothing answers in its place.
    """
    place = command.folder / CLUSTER
    cluster = json.loads(place.read_text()) if place.exists() else {"gcs": None, "raylet's": []}
    if processes := [*command.processes(), *_alive(cluster["raylet's"])]:
        return f"processes are left: {processes}"
    if is_held(command.run_dir / LOCK):
        return "the run directory is locked"
    if cluster["gcs"] is not None and answers(cluster["gcs"]):
        return "the run's GCS answers, which keeps its placement groups"
    return None


def _alive(processes: Sequence[tuple[int, float]]) -> list[psutil.Process]:
    """Return which processes run, by their ids and times of creation."""
    alive = []
    for pid, created in processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def is_held(path: Path) -> bool:
    """Return whether a process holds an fcntl lock on a file."""
    try:
        with path.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def answers(address: str) -> bool:
    """Return whether a process listens at `host:port`."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def end_of(folder: Path, case: Case, undisturbed: Path, steps: int, step: int, workers: str | None = None) -> Finding:
    """Run one case whose fault ends the run, and return what came of it.

    Where all workers have to end with another process, they are Ray's own.
    """
    overrides = settings(case.layout, steps)
    server = None if case.ends_workers else workers
    with started(folder, [case.planned(step)], overrides, workers=server) as command:
        code, said = wait(command, is_stopped=case.role == "driver" and case.fault == "stop")
        text = _text(command)
        if code is None:
            return Finding(f"it runs after {DEADLINE_S:g} s", text=text)
        happened = fired(folder)
        if left := left_of(command):
            return Finding(left, text=text)
    if not happened:
        return Finding("the fault did not happen", text=text)
    seconds = said - happened[0]["time"]
    if case.outcome != "resumed":
        return Finding(problem(case, code, text, step) or "error", seconds, text)
    with started(folder, [], (*overrides, "resume=auto"), workers=workers) as command:
        code, _ = wait(command, is_stopped=False)
        if code != 0:
            return Finding(f"resuming ended with {code}", seconds, _text(command))
    same = is_same(folder / "run", undisturbed)
    return Finding("resumed" if same else "other bits than the undisturbed run", seconds)


def problem(case: Case, code: int, text: str, step: int) -> str | None:
    """Return what is wrong with the end of a run by an error, None if nothing is."""
    if code != 1:
        return f"exit code {code}"
    line = next((line for line in text.splitlines() if "Error" in line or "role " in line), "")
    words = {"driver": ["on order"], "raylet": ["raylet"], "GCS": ["gcs_server"]}.get(case.role)
    if case.role == "driver" and case.fault == "memory limit":
        words = ["MemoryError"]
    if words is None:
        planned = case.planned(step)
        words = [f"rank {planned['rank']}", "in start" if case.phase == "start" else f"step {step} of train"]
        if case.is_order:
            # While rewards are scored and weights travel, several roles have calls in a process; the error names one.
            # The reference computes its log-probs just before the actor; a process that is killed may not have replied.
            faults = ("kill", "stop", "lost reply")
            several = {"score": faults, "transfer": faults, "log-probs": ("kill",)}.get(case.phase, ())
            has_several = case.layout == "one pool" and case.fault in several
            words.append("role " if has_several else f"role {planned['role']}")
    missing = [word for word in words if word not in text]
    return f"the error lacks {missing[0]!r}: {line}" if missing else None


def shared(
    folder: Path, cases: Sequence[Case], undisturbed: Path, steps: int, workers: str | None = None
) -> dict[Case, Finding]:
    """Run several cases that a run survives, each at a step of its own for its role, and return what came of them."""
    plan, place = [], {}
    for case in cases:
        number = place[case.role] = place.get(case.role, 0) + 1
        plan.append(case.planned(min(number, steps)))
    with started(folder, plan, settings(cases[0].layout, steps), workers=workers) as command:
        code, _ = wait(command, is_stopped=False, deadline_s=DEADLINE_S + 30.0 * len(cases))
        text = _text(command)
        left = left_of(command)
    happened = {one["id"] for one in fired(folder)}
    restarts = restarts_of(folder / "run") if code == 0 else {}
    restarted = {"rollout": "rollout", "reference": "reference", "reward pool": "reward", "judge": "judge"}
    seconds = sum(record.get("time/restart_s", 0.0) for record in records(folder / "run"))
    same = code == 0 and is_same(folder / "run", undisturbed)
    findings = {}
    for case in cases:
        wanted = sum(one.role == case.role for one in cases) if case.outcome == "repeated" else 0
        found = restarts.get(restarted.get(case.role, ""), 0.0)
        if code != 0:
            outcome = f"exit code {code}"
        elif str(case) not in happened:
            outcome = "the fault did not happen"
        elif left:
            outcome = left
        elif not same:
            outcome = "other bits than the undisturbed run"
        elif found != wanted:
            outcome = f"{found:g} restarts of the role, {wanted} expected"
        else:
            outcome = case.outcome
        findings[case] = Finding(outcome, seconds / max(1.0, sum(restarts.values())), text, restarts)
    return findings
