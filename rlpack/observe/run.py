"""A run as a recipe uses it: metrics, timers, progress, samples and graceful interruption.

>>> import tempfile
>>> from rich.console import Console as RichConsole
>>> run_dir = Path(tempfile.mkdtemp()) / "first"
>>> with Run.start(Config(), run_dir, console=Console(RichConsole(quiet=True))) as run:
...     with run.timer("update"):
...         pass
...     run.log(1, {"reward/mean": 0.5})
>>> sorted(path.name for path in run_dir.iterdir())
['config.yaml', 'end.json', 'metrics.jsonl', 'report.html', 'run.log']
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rlpack import __version__
from rlpack.config.redaction import without_secrets
from rlpack.config.roles import chunks_of
from rlpack.config.schema import Config
from rlpack.observe.console import TITLES, Console, ProgressBar, Sample
from rlpack.observe.errors import ReportError, RunTakenOverError
from rlpack.observe.learning_signal import NUM_STEPS, lacks_signal, no_signal_text
from rlpack.observe.metric_values import as_numbers
from rlpack.observe.pending_records import PendingRecords
from rlpack.observe.report.plan_record import read_plan
from rlpack.observe.run_dir import (
    LENGTHS,
    LOG,
    METRICS,
    REPORT,
    SAMPLES,
    has_started,
    open_run_dir,
    remove_unstarted_run,
)
from rlpack.observe.run_end import RunEnd
from rlpack.observe.run_lock import RunLock
from rlpack.observe.sinks import (
    LogPhase,
    ResumePoint,
    Sink,
    check_packages,
    close_sinks,
    open_sinks,
    read_records,
)
from rlpack.observe.stored_samples import truncate_samples
from rlpack.observe.terminal import STANDARD_ERROR, discard, is_ignored_hangup, leave_closed_terminal
from rlpack.packing.analysis.data_rank import DataRank
from rlpack.packing.plan import MicrobatchPlan
from rlpack.run_log import RunLog, attached_log, current_log
from rlpack.user_code import Interrupted

logger = logging.getLogger(__name__)

WARMUP_LINES = 20
INTERRUPT_AT_START = b"\ninterrupted: stopping once the roles have started; press Ctrl-C again to stop at once\n"
FIRST_INTERRUPT = b"\ninterrupted: finishing the step, then saving; press Ctrl-C again to stop at once\n"
# Ctrl-C, what a scheduler sends before it ends a job, and what a closed terminal sends.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# `timeout` and some schedulers send SIGTERM to the process and to its group; within this time they count as one.
SAME_SIGTERM_S = 1.0


class Run:
    """One run: its directory, log, sinks, console, timers and signal handling.

    Use it as a context manager. Inside, the first Ctrl-C, SIGTERM or SIGHUP only sets `interrupted`, the second
    raises KeyboardInterrupt; two SIGTERMs within a second count as one, and SIGHUP never counts as the second. On exit,
    even after an error, the sinks are closed and the report is written.

    Attributes:
        run_dir: directory of the run.
        interrupted: whether the run should stop after the current step.
        has_begun: whether a step has started, which an interrupted run completes and saves.
    """

    def __init__(
        self,
        run_dir: Path,
        sinks: Sequence[Sink],
        console: Console,
        totals: Mapping[LogPhase, int],
        lock: RunLock | None = None,
    ) -> None:
        """Use open sinks; `totals` are the planned steps of each phase."""
        self.run_dir = run_dir
        self._lock = lock
        self.interrupted = False
        self.has_begun = False
        self._interrupted_at = 0.0
        self._sinks = sinks
        self._console = console
        self._totals = totals
        self._times: dict[str, float] = {}
        self._pending = PendingRecords()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._finished = False
        self._keeps_dir = False  # the directory has records or checkpoints of an earlier attempt
        self._steps_without_signal: list[Mapping[str, float]] | None = []  # None once it is decided whether to warn
        self._log: RunLog | None = None
        self._own_log = ExitStack()

    @classmethod
    def start(
        cls,
        config: Config,
        run_dir: Path,
        *,
        resume_at: ResumePoint | None = None,
        console: Console | None = None,
        lock: RunLock | None = None,
        shape: tuple[int, int] | None = None,
    ) -> Self:
        """Create the run directory, write `config.yaml` and open the sinks.

        Records of an earlier attempt without a checkpoint stay until the first `log` replaces them.

        Args:
            config: the whole configuration, which is stored with secrets hidden.
            run_dir: directory of the run; with `resume=auto` it may already contain one.
            resume_at: place of the loaded checkpoint; later records are deleted. None starts from scratch.
            console: where lines are printed; None is standard output.
            lock: lock of the directory; a run without one doesn't check that the directory is still its own.
            shape: hidden size and number of layers of the policy, by which `rlpack plan` estimates activations.

        Raises:
            RunDirectoryError: the directory can't be used.
            SinkError: a sink's package is missing, or its service refuses the run.
        """
        check_packages(config.logger)  # before the directory is created
        values = without_secrets(config.model_dump(mode="json"))
        open_run_dir(run_dir, values, resume=config.resume == "auto")
        had_started = has_started(run_dir)
        if resume_at is not None:
            truncate_samples(run_dir / SAMPLES, resume_at)
        try:
            sinks = open_sinks(config.logger, run_dir, values, resume_at)
        except BaseException:
            if not had_started:
                remove_unstarted_run(run_dir)
            raise
        totals: dict[LogPhase, int] = {"sft_warmup": config.sft_warmup.steps, "train": config.trainer.steps}
        run = cls(run_dir, sinks, Console() if console is None else console, totals, lock)
        parallel = config.actor.parallel
        chunks = chunks_of(parallel, parallel.cp)
        run._pending.shape, run._pending.data_rank = shape, DataRank(parallel.cp, parallel.tp, parallel.pp, chunks)
        run._keeps_dir, run._pending.replaces_samples = had_started, resume_at is None
        if resume_at is not None and resume_at.phase == "train" and resume_at.step > 0:
            run._steps_without_signal = None  # the run's first steps are in its records
        return run

    def log(self, step: int, metrics: Mapping[str, float], phase: LogPhase = "train") -> None:
        """Write a step's metrics to every sink and the console.

        The times measured since the last call are added to them.

        Raises:
            MetricError: a metric is not one number; nothing is written.
            SinkWriteError: the metrics can't be written, for example because the disk is full.
            RunTakenOverError: another process has taken over the run directory.
        """
        self.check_lock()
        metrics = as_numbers(metrics)
        record = {**metrics, **{name: metrics.get(name, 0.0) + seconds for name, seconds in self._times.items()}}
        self._times = {}
        for sink in self._sinks:
            sink.log(step, phase, record)
        self._pending.write(self.run_dir, step, phase)
        total = self._totals.get(phase)
        # Warm-up steps are short and many; printing them all would scroll everything else away.
        is_due = step in (1, total) or step % max(1, (total or 0) // WARMUP_LINES) == 0
        if phase != "sft_warmup" or is_due or self._console.is_silent():
            self._console.line(step, phase, record, total)

        if phase == "train":
            self._check_signal(step, record)
        if self._log is not None and phase != "evaluation":
            self._log.has_steps = True

    def check_lock(self) -> None:
        """Raise if the run directory is no longer this run's; called before writes.

        Raises:
            RunTakenOverError: another process has taken it over.
        """
        if self._lock is not None:
            self._lock.check()

    def _check_signal(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once if the first training steps have equal rewards, and more steps follow."""
        flat = self._steps_without_signal
        if flat is None or not lacks_signal(metrics):
            self._steps_without_signal = None
            return
        flat.append(metrics)
        if len(flat) == NUM_STEPS:
            self._steps_without_signal = None
            if step < self._totals.get("train", 0):
                logger.warning("%s", no_signal_text(flat))

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

    def progress(self, total: float, phase: LogPhase) -> AbstractContextManager[ProgressBar]:
        """Show the progress of a phase's steps on a terminal; elsewhere the lines of `log` show it."""
        return self._console.progress(total, TITLES[phase], plain=False)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Print rollouts, and store them for the report with the next `log`."""
        self._console.show_samples(samples)
        self._pending.samples += samples

    def record_plan(self, plan: MicrobatchPlan, responses: Sequence[int] | None = None) -> None:
        """Store a plan's inputs, and the tokens generated in each of its rows, with the next `log`.

        The packing picture shows the last one stored.
        """
        self._pending.plan = (plan, responses)

    def note(self, message: str) -> None:
        """Print a message on the console."""
        self._console.note(message)
        if self._log is not None:
            self._log.record("INFO", message)

    @property
    def log_path(self) -> Path | None:
        """Return the path of `run.log`, to which ranks append too; None outside the `with` block."""
        return None if self._log is None else self._log.path

    def set_ray_logs(self, folder: str) -> None:
        """Name the folder of Ray's own logs in `run.log`, and at the end of an error."""
        if self._log is not None:
            self._log.ray_logs = folder
            self._log.record("INFO", f"Ray's logs: {folder}")

    @contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Record an error of this block at once, before the ranks are ended and the report is written."""
        try:
            yield
        except Exception as error:
            self._record_failure(error)
            raise

    def _record_failure(self, error: BaseException | None) -> None:
        """Append an error's traceback to `run.log`, and report the error on the console of a command."""
        if self._log is None or not isinstance(error, Exception):
            return
        if isinstance(error, RunTakenOverError) or not self._has_started():
            self._log.stop()  # the directory belongs to another process, or is deleted
        self._log.record_failure(error)

    def finish(self) -> Path:
        """Close the sinks, write `report.html`, print a summary, and return the report's path.

        A report that can't be written only causes a warning. Later calls only return the path.

        Raises:
            Exception: a sink can't be closed; the others are, and the report is written.
        """
        path = self.run_dir / REPORT
        if self._finished:
            return path
        try:
            self._close_sinks()
        finally:
            self._try_report(path)
        return path

    def _try_report(self, path: Path) -> None:
        """Write the report, or warn why not."""
        try:
            self._report()
        except ReportError as error:
            logger.warning("%s", error)
        except Exception as error:  # noqa: BLE001 - drawing can fail in many ways, and no training depends on it
            logger.warning("the report could not be written to %s: %s: %s", path, type(error).__name__, error)

    def _report(self) -> None:
        """Write the report and print a summary."""
        # Imported here because matplotlib takes a second, which would delay every start.
        from rlpack.observe.report.report import write_report
        from rlpack.observe.report.summary import packing_table, summarize

        path = write_report(self.run_dir)
        records = list(read_records(self.run_dir / METRICS))
        rows = summarize(records, read_plan(self.run_dir / LENGTHS))
        self._console.table([(row.label, row.before or "", row.after) for row in rows])
        self._console.columns(packing_table(records))
        self._console.note(f"report: {path.absolute()}")

    def _close_sinks(self) -> None:
        self._finished = True
        close_sinks(self._sinks)

    def __enter__(self) -> Self:
        """Open `run.log`, and install the signal handlers if this is the main thread.

        Under `nohup`, SIGHUP stays ignored.
        """
        self._open_log()
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if not is_ignored_hangup(number)]
            self._previous_handlers = {number: signal.signal(number, self._handle_signal) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the signal handlers and finish.

        A sink that can't be closed doesn't hide the error that ended the run.

        A run that failed before its first record leaves no directory and no report, unless the directory has records or
        checkpoints of an earlier attempt. One whose directory was taken over leaves the directory alone.
        """
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
        self._record_failure(error)
        failed_at_start = error is not None and not self._has_started()
        try:
            if isinstance(error, RunTakenOverError):
                self._close_sinks()
            elif failed_at_start:
                self._close_sinks()
                remove_unstarted_run(self.run_dir)
            else:
                self._write_end(error)
                self.finish()
        except Exception as failure:
            if error is None:
                self._write_end(failure)
                raise
            # else it is logged, and the run's own error came first
        finally:
            self._own_log.close()

    def _write_end(self, error: BaseException | None) -> None:
        """Store how the run ended; an error that ends it comes first."""
        try:
            RunEnd.of(error).write(self.run_dir)
        except OSError as full:
            logger.warning("how the run ended can't be stored: %s", full)

    def _has_started(self) -> bool:
        """Return whether this run, or an earlier attempt in its directory, has written a record or a checkpoint."""
        return self._keeps_dir or has_started(self.run_dir)

    def _open_log(self) -> None:
        """Append what the process logs to `run.log`, starting with what a command has logged since its start."""
        self._log = current_log() or self._own_log.enter_context(attached_log("driver"))
        try:
            self._log.open(self.run_dir / LOG)
        except OSError as error:
            logger.warning("no log is written: %s", error)
        self._log.record("INFO", f"rlpack {__version__}, process {os.getpid()} on {socket.gethostname()}")

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Set `interrupted` on the first signal, raise on the second."""
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if self.interrupted:
            is_same = number == signal.SIGTERM and time.monotonic() - self._interrupted_at < SAME_SIGTERM_S
            if is_same or number == signal.SIGHUP:  # a terminal's shell and the kernel both send one
                return
            raise Interrupted
        self.interrupted, self._interrupted_at = True, time.monotonic()
        self._console.go_on_without_reader()  # Ctrl-C also ends the `tee` of a pipeline
        # Not through logging or rich, whose writes this handler may interrupt.
        try:
            os.write(STANDARD_ERROR, FIRST_INTERRUPT if self.has_begun else INTERRUPT_AT_START)
        except OSError:
            discard(STANDARD_ERROR)
