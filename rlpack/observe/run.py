"""A run as a recipe uses it: metrics, timers, progress, samples and graceful interruption.

>>> import tempfile
>>> from rich.console import Console as RichConsole
>>> run_dir = Path(tempfile.mkdtemp()) / "first"
>>> with Run.start(Config(), run_dir, console=Console(RichConsole(quiet=True))) as run:
...     with run.timer("update"):
...         pass
...     run.log(1, {"reward/mean": 0.5})
>>> sorted(path.name for path in run_dir.iterdir())
['config.yaml', 'metrics.jsonl', 'report.html']
"""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol, Self

from rlpack.config.redaction import without_secrets
from rlpack.config.schema import Config
from rlpack.observe.console import Console, ProgressBar, Sample
from rlpack.observe.report.plan_record import PlanRecord, read_plan
from rlpack.observe.run_dir import (
    LENGTHS,
    METRICS,
    REPORT,
    SAMPLES,
    has_started,
    open_run_dir,
    read_samples,
    remove_unstarted_run,
)
from rlpack.observe.sinks import LogPhase, ResumePoint, Sink, check_packages, open_sinks, read_records
from rlpack.packing.plan import MicrobatchPlan

logger = logging.getLogger(__name__)

WARMUP_LINES = 20
FIRST_INTERRUPT = b"\ninterrupted: finishing the step, then saving; press Ctrl-C again to stop at once\n"
# Ctrl-C, and what a scheduler sends before it ends a job.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout` and some schedulers send SIGTERM to the process and to its group; within this time they count as one.
SAME_SIGTERM_S = 1.0


class Position(Protocol):
    """The last completed step of a run; a recipe's progress record satisfies it."""

    @property
    def phase(self) -> Literal["sft_warmup", "train"]:
        """Phase of the last completed step."""
        ...

    @property
    def step(self) -> int:
        """The last completed step."""
        ...


class Run:
    """One run: its directory, sinks, console, timers and signal handling.

    Use it as a context manager. Inside, the first Ctrl-C or SIGTERM only sets `interrupted`, the second raises
    KeyboardInterrupt; two SIGTERMs within a second count as one. On exit, also after an error, the sinks are closed and
    the report is written.

    Attributes:
        run_dir: directory of the run.
        interrupted: whether the run should stop after the current step.
    """

    def __init__(self, run_dir: Path, sinks: Sequence[Sink], console: Console, totals: Mapping[LogPhase, int]) -> None:
        """Use open sinks; `totals` are the planned steps of each phase."""
        self.run_dir = run_dir
        self.interrupted = False
        self._interrupted_at = 0.0
        self._sinks = sinks
        self._console = console
        self._totals = totals
        self._times: dict[str, float] = {}
        self._pending_samples: list[Sample] = []
        self._pending_plan: MicrobatchPlan | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._finished = False

    @classmethod
    def start(
        cls, config: Config, run_dir: Path, *, resume_at: Position | None = None, console: Console | None = None
    ) -> Self:
        """Create the run directory, write `config.yaml` and open the sinks.

        Args:
            config: the whole configuration, which is stored with secrets hidden.
            run_dir: directory of the run; with `resume=auto` it may already contain one.
            resume_at: position of the loaded checkpoint; later records are deleted. None starts from scratch.
            console: where lines are printed; None is standard output.

        Raises:
            RunDirectoryError: the directory can't be used.
            SinkError: a sink's package is missing, or its service refuses the run.
        """
        check_packages(config.logger)  # before the directory is created
        values = without_secrets(config.model_dump(mode="json"))
        open_run_dir(run_dir, values, resume=config.resume == "auto")
        point = None if resume_at is None else ResumePoint(resume_at.step, resume_at.phase)
        _truncate_samples(run_dir / SAMPLES, point)
        try:
            sinks = open_sinks(config.logger, run_dir, values, point)
        except BaseException:
            remove_unstarted_run(run_dir)
            raise
        totals: dict[LogPhase, int] = {"sft_warmup": config.sft_warmup.steps, "train": config.trainer.steps}
        return cls(run_dir, sinks, Console() if console is None else console, totals)

    def log(self, step: int, metrics: Mapping[str, float], phase: LogPhase = "train") -> None:
        """Write a step's metrics to every sink and the console.

        The times measured since the last call are added to them.
        """
        record = {**metrics, **self._times}
        self._times = {}
        for sink in self._sinks:
            sink.log(step, phase, record)
        self._write_pending(step, phase)
        total = self._totals.get(phase)
        # Warm-up steps are short and many; printing them all would scroll everything else away.
        if phase != "sft_warmup" or step in (1, total) or step % max(1, (total or 0) // WARMUP_LINES) == 0:
            self._console.line(step, phase, record, total)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the time inside to `time/<name>_s` of the next `log`.

        Timers can repeat and nest.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}_s"
            self._times[key] = self._times.get(key, 0.0) + time.perf_counter() - started

    def progress(self, total: float, description: str) -> AbstractContextManager[ProgressBar]:
        """Show the progress of long work on the console."""
        return self._console.progress(total, description)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Print rollouts, and store them for the report with the next `log`."""
        self._console.show_samples(samples)
        self._pending_samples += samples

    def record_plan(self, plan: MicrobatchPlan) -> None:
        """Store a plan's inputs with the next `log`.

        The packing picture shows the last one stored.
        """
        self._pending_plan = plan

    def note(self, message: str) -> None:
        """Print a message on the console."""
        self._console.note(message)

    def finish(self) -> Path:
        """Close the sinks, write `report.html`, print a summary, and return the report's path.

        Later calls only return the path.
        """
        if self._finished:
            return self.run_dir / REPORT
        self._close_sinks()
        # Imported here because matplotlib takes a second, which would delay every start.
        from rlpack.observe.report.report import write_report
        from rlpack.observe.report.summary import summarize

        path = write_report(self.run_dir)
        rows = summarize(list(read_records(self.run_dir / METRICS)), read_plan(self.run_dir / LENGTHS))
        self._console.table([(row.label, row.before or "", row.after) for row in rows])
        self._console.note(f"report: {path.absolute()}")
        return path

    def _close_sinks(self) -> None:
        self._finished = True
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        """Install the signal handlers, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._handle_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the signal handlers and finish.

        A failing report doesn't hide the error that ended the run.

        A run that failed before its first record leaves no directory and no report.
        """
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
        failed_at_start = error is not None and not has_started(self.run_dir)
        try:
            if failed_at_start:
                self._close_sinks()
                remove_unstarted_run(self.run_dir)
            else:
                self.finish()
        except Exception:
            if error is None:
                raise
            logger.exception("the report could not be written to %s", self.run_dir)

    def _write_pending(self, step: int, phase: LogPhase) -> None:
        """Write the samples and the plan recorded since the last `log`."""
        if self._pending_plan is not None:
            PlanRecord.of(self._pending_plan, step).write(self.run_dir / LENGTHS)
        if self._pending_samples:
            # ASCII, because lone surrogates in a model's text can't be encoded as UTF-8.
            position = {"step": step, "phase": phase}
            lines = [json.dumps(position | asdict(sample)) + "\n" for sample in self._pending_samples]
            with (self.run_dir / SAMPLES).open("a", encoding="utf-8") as stream:
                stream.writelines(lines)
        self._pending_plan, self._pending_samples = None, []

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Set `interrupted` on the first signal, raise on the second."""
        if self.interrupted:
            if number == signal.SIGTERM and time.monotonic() - self._interrupted_at < SAME_SIGTERM_S:
                return
            raise KeyboardInterrupt
        self.interrupted, self._interrupted_at = True, time.monotonic()
        # Not through logging or rich, whose writes this handler may interrupt.
        os.write(2, FIRST_INTERRUPT)


def _truncate_samples(path: Path, point: ResumePoint | None) -> None:
    """Delete the stored rollouts after the resume point; all of them without one."""
    defaults = {"step": 0, "phase": "train"}  # for lines that lack them
    retained = [sample for sample in read_samples(path) if point is not None and point.covers(defaults | sample)]
    if path.exists():
        path.write_text("".join(json.dumps(sample) + "\n" for sample in retained), encoding="utf-8")
