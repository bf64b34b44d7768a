"""Run `rlpack` in separate processes, and read its run directory."""

import atexit
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

import rlpack
from rlpack.cli.main import main
from rlpack.user_code import exit_now
from tests.fork_server import environment, fork_context
from tests.forked_workers import ADDRESS, forked_workers, shared_servers, worker_of

ROOT = Path(rlpack.__file__).parents[1]
DEADLINE_S = 240.0
# A start that hangs says so before the test gives up.
_DEADLINES = ("placement.start_timeout_s=120",)
# Every process of a run inherits it, whatever its parent or session becomes.
MARK = "RLPACK_END_TO_END_RUN"
# At collection: commands that tests run in this process add their working directories.
_IMPORT_PATH = tuple(sys.path)


@dataclass
class Command:
    """A command under way, or done.

    Attributes:
        folder: its working directory.
        run_dir: the run's directory.
        process: the process that was started, leader of its own process group, as in a terminal; None if it ended in
            another process of the tests.
        mark: what its processes have in their environment.
    """

    folder: Path
    run_dir: Path
    process: BaseProcess | None
    mark: str = ""
    code: int | None = field(default=None, init=False)

    @property
    def out(self) -> str:
        return (self.folder / f"{self.mark}.out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / f"{self.mark}.err").read_text()

    def wait(self) -> int:
        """Return the exit code."""
        self.process.join(DEADLINE_S)
        assert self.process.exitcode is not None, (
            f"it runs after {DEADLINE_S:g} s:\n{self.out}{self.err}{self.stacks()}"
        )
        self.code = self.process.exitcode
        return self.code

    def wait_for(self, phase: str, step: int) -> None:
        """Return as soon as a step of a phase is logged."""

        def logged() -> bool:
            assert self.process.exitcode is None, f"it ended with {self.process.exitcode}:\n{self.err}"
            return any(r["phase"] == phase and r["step"] >= step for r in records(self.run_dir))

        until(logged, DEADLINE_S)

    def interrupt(self) -> None:
        """Press Ctrl-C, which a terminal sends to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Ask the command and its whole group to end, as `timeout` and many schedulers do."""
        self.process.terminate()
        os.killpg(self.process.pid, signal.SIGTERM)

    def processes(self) -> list[psutil.Process]:
        """Return what is alive of the run, on this machine."""
        return [process for process in psutil.process_iter() if _belongs(process, self)]

    def stacks(self) -> str:
        """Return what each process of the run is doing, for the message of a missed deadline."""
        return "\n".join(_stack(process) for process in self.processes())

    def left_behind(self, grace_s: float = 30.0) -> list[psutil.Process]:
        """Return what is still alive some seconds after the command's end."""
        begin = time.monotonic()
        while (alive := self.processes()) and time.monotonic() - begin < grace_s:
            time.sleep(0.1)
        return alive


def _stack(process: psutil.Process) -> str:
    """Return the title and the stacks of a process."""
    tool = Path(sys.executable).with_name("py-spy")
    try:
        if (address := process.environ().get(ADDRESS)) is not None:
            with suppress(OSError, ValueError):  # not one that waits for a worker
                process = psutil.Process(worker_of(process.pid, address))
        title = " ".join(process.cmdline())[:120]
        if not tool.exists() or not process.name().startswith(("python", "ray::", "pt_")):
            return f"{process.pid} {title}"
        dump = subprocess.run([tool, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=30.0)
        return f"{process.pid} {title}\n{dump.stdout}{dump.stderr}"
    except (psutil.Error, OSError, subprocess.TimeoutExpired) as error:
        return f"{process.pid}: {error}"


def _belongs(process: psutil.Process, command: Command) -> bool:
    """Return whether a process is the command's own or has its mark, which the titles of Ray's two agents overwrite."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        itself = command.process is not None and process.pid == command.process.pid
        return itself or process.environ().get(MARK) == command.mark
    except psutil.Error:  # gone meanwhile, or another user's
        return False


@contextmanager
def started(
    folder: Path,
    *overrides: str,
    run_dir: str = "run",
    ranks: int = 2,
    path: Sequence[Path] = (),
    forks_workers: bool = True,
) -> Iterator[Command]:
    """Start `rlpack train` in `folder`, `path` on its PYTHONPATH; nothing of it outlives the block."""
    words = ["train", f"run_dir={run_dir}", f"placement.pools.main.ranks={ranks}", *_DEADLINES, *overrides]
    with started_words(folder, words, folder / run_dir, path, forks_workers=forks_workers) as command:
        yield command


@contextmanager
def started_words(
    folder: Path, words: list[str], run_dir: Path, path: Sequence[Path] = (), *, forks_workers: bool = True
) -> Iterator[Command]:
    """Start any `rlpack` command in `folder`, `path` on its PYTHONPATH; nothing of it outlives the block.

    Its process is forked from one that has imported what the command needs, which takes most of a short run's time. So
    are the ranks, if `forks_workers` is true; otherwise Ray starts them as ever.
    """
    folder.mkdir(exist_ok=True)
    mark = secrets.token_hex(8)
    own = [str(place) for place in [ROOT, *path]]
    variables = environment() | {"PYTHONPATH": os.pathsep.join(own), MARK: mark, "WANDB_SILENT": "true"}
    variables.pop(ADDRESS, None)  # of a Ray that this process runs
    if forks_workers and (workers := shared_servers()) is not None:
        variables[ADDRESS] = workers
    process = fork_context().Process(
        target=_run_command, args=(folder, words, [*own, *_IMPORT_PATH, str(folder)], variables, mark)
    )
    process.start()
    command = Command(folder, run_dir, process, mark)
    try:
        yield command
    finally:
        for left in command.processes():
            left.kill()
        process.join()


def _run_command(
    folder: Path, words: list[str], places: list[str], variables: dict[str, str], mark: str, *, log_monitor: bool = True
) -> None:
    """Become a process like that of `python -m rlpack`, leader of its own session, and end as it does."""
    os.setsid()
    for descriptor, suffix in ((1, "out"), (2, "err")):
        with (folder / f"{mark}.{suffix}").open("w") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = list(dict.fromkeys(places))
    try:
        with forked_workers(variables[ADDRESS], log_monitor=log_monitor) if ADDRESS in variables else nullcontext():
            sys.exit(main(words))
    finally:
        atexit._run_exitfuncs()  # as at the end of any other process; `multiprocessing` leaves them out
        os._exit = exit_now  # the command refuses to end this way, which is how `multiprocessing` ends a process


def done(
    folder: Path,
    *overrides: str,
    run_dir: str = "run",
    ranks: int = 2,
    path: Sequence[Path] = (),
    forks_workers: bool = True,
) -> Command:
    """Run `rlpack train` to its end, which has to be a good one and to leave no process."""
    with started(folder, *overrides, run_dir=run_dir, ranks=ranks, path=path, forks_workers=forks_workers) as command:
        assert command.wait() == 0, command.err
        assert "Traceback" not in command.err
        assert command.left_behind() == []
    return command


def until(condition: Callable[[], bool], deadline_s: float) -> None:
    """Return when the condition holds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < deadline_s, "it took too long"
        time.sleep(0.02)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the whole lines of metrics.jsonl, in order."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curve(run_dir: Path, name: str, phase: str = "train") -> list[float]:
    """Return a metric's figures over the steps of a phase."""
    return [record[name] for record in records(run_dir) if record["phase"] == phase]


def steps(run_dir: Path, phase: str) -> list[int]:
    """Return the steps of a phase in the order in which they were logged."""
    return [record["step"] for record in records(run_dir) if record["phase"] == phase]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Return what of a record doesn't depend on the clock or the machine's memory."""
    return {name: value for name, value in record.items() if not name.startswith(("time", "throughput", "perf/"))}


def committed(run_dir: Path, phase: str) -> list[int]:
    """Return the steps of the committed checkpoints of a phase."""
    markers = (run_dir / "checkpoints" / phase).glob("step-*/COMMITTED")
    return sorted(int(marker.parent.name.removeprefix("step-")) for marker in markers)
