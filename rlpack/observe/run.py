"""A run as the recipe sees it: `run.log`, `run.timer`, `run.progress`, `run.samples`, `run.interrupted`.

>>> import tempfile
>>> from rich.console import Console as Screen
>>> folder = Path(tempfile.mkdtemp()) / "first"
>>> with Run.start(Config(), folder, console=Console(Screen(quiet=True))) as run:
...     with run.timer("update"):
...         pass
...     run.log(1, {"reward/mean": 0.5})
>>> sorted(path.name for path in folder.iterdir())
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
from rlpack.observe.console import Console, Progress, Sample
from rlpack.observe.report.plan_record import PlanRecord, read_plan
from rlpack.observe.run_dir import LENGTHS, METRICS, REPORT, SAMPLES, give_back, has_begun, open_run_dir, read_samples
from rlpack.observe.sinks import Phase, ResumePoint, Sink, check_packages, open_sinks, read_records
from rlpack.packing.plan import MicrobatchPlan

logger = logging.getLogger(__name__)

WARM_UP_LINES = 20
FIRST_INTERRUPT = b"\ninterrupted: finishing the step, then saving; press Ctrl-C again to stop at once\n"
# What a user's Ctrl-C sends, and what a scheduler sends before it takes the machine away.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout` and some schedulers send SIGTERM to the process and to its group: that is one request, not two.
SAME_SIGTERM_S = 1.0


class Place(Protocol):
    """Where a run stands: the recipe's own record of its progress will do."""

    @property
    def phase(self) -> Literal["sft_warmup", "train"]:
        """Phase of the last step that is done."""
        ...

    @property
    def step(self) -> int:
        """The last step that is done."""
        ...


class Run:
    """One run: its directory, its sinks, its console, its timers and its Ctrl-C.

    Use it as a context manager: inside, the first Ctrl-C or SIGTERM only sets `interrupted`, the second raises
    KeyboardInterrupt (a SIGTERM that comes twice at once is one). Leaving closes the sinks and writes the report, also
    after an error.
    """

    def __init__(self, directory: Path, sinks: Sequence[Sink], console: Console, totals: Mapping[Phase, int]) -> None:
        self.directory = directory
        self.interrupted = False
        self._interrupted_at = 0.0
        self._sinks = sinks
        self._console = console
        self._totals = totals
        self._times: dict[str, float] = {}
        self._pending_samples: list[Sample] = []
        self._pending_plan: MicrobatchPlan | None = None
        self._usual: dict[signal.Signals, Any] = {}
        self._finished = False

    @classmethod
    def start(
        cls, config: Config, directory: Path, *, resume_at: Place | None = None, console: Console | None = None
    ) -> Self:
        """Make the run directory, write `config.yaml` and open the sinks.

        Args:
            config: the whole configuration, which is written down (keys that look like secrets are hidden).
            directory: directory of the run; with `resume=auto` it may already hold one.
            resume_at: the loaded checkpoint's place; records behind it are cut off. None begins anew.
            console: where lines go; None is the standard output.

        Raises:
            RunDirectoryError: the directory can't be used.
            SinkError: a package that a sink needs is missing, or its service refuses.
        """
        check_packages(config.logger)  # before the directory counts as taken
        values = without_secrets(config.model_dump(mode="json"))
        open_run_dir(directory, values, resume=config.resume == "auto")
        point = None if resume_at is None else ResumePoint(resume_at.step, resume_at.phase)
        _cut_samples(directory / SAMPLES, point)
        try:
            sinks = open_sinks(config.logger, directory, values, point)
        except BaseException:
            give_back(directory)
            raise
        totals: dict[Phase, int] = {"sft_warmup": config.sft_warmup.steps, "train": config.trainer.steps}
        return cls(directory, sinks, Console() if console is None else console, totals)

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase = "train") -> None:
        """Write a step's metrics to every sink and the console; times measured since the last call are added."""
        record = {**metrics, **self._times}
        self._times = {}
        for sink in self._sinks:
            sink.log(step, phase, record)
        self._keep_pending(step, phase)
        total = self._totals.get(phase)
        # Supervised steps are short and many: a line for each would push all others off the screen.
        if phase != "sft_warmup" or step in (1, total) or step % max(1, (total or 0) // WARM_UP_LINES) == 0:
            self._console.line(step, phase, record, total)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the time inside to `time/<name>_s` of the next `log`; the same name adds up, names may nest."""
        began = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}_s"
            self._times[key] = self._times.get(key, 0.0) + time.perf_counter() - began

    def progress(self, total: float, description: str) -> AbstractContextManager[Progress]:
        """Show the progress of long work on the console."""
        return self._console.progress(total, description)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Show rollouts on the console; the next `log` keeps them, with its step, for the report."""
        self._console.show_samples(samples)
        self._pending_samples += samples

    def keep_plan(self, plan: MicrobatchPlan) -> None:
        """Have the next `log` keep what a plan was made from; the packing picture shows the last one kept."""
        self._pending_plan = plan

    def note(self, message: str) -> None:
        """Show a line on the console."""
        self._console.note(message)

    def finish(self) -> Path:
        """Close the sinks, write `report.html`, show what the run came to, and return the report's path.

        Further calls only return the path.
        """
        if self._finished:
            return self.directory / REPORT
        self._close_sinks()
        # Imported here: matplotlib takes a second, which nobody should wait for at the start.
        from rlpack.observe.report.report import write_report
        from rlpack.observe.report.summary import summarise

        path = write_report(self.directory)
        rows = summarise(list(read_records(self.directory / METRICS)), read_plan(self.directory / LENGTHS))
        self._console.table([(row.label, row.before or "", row.after) for row in rows])
        self._console.note(f"report: {path.absolute()}")
        return path

    def _close_sinks(self) -> None:
        self._finished = True
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        """Take over Ctrl-C and SIGTERM, where Python allows it: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._usual = {number: signal.signal(number, self._interrupt) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the signals back and finish; a report that fails must not hide the error that ended the run.

        A run that failed before its first record leaves no directory and has nothing to report.
        """
        for number, usual in self._usual.items():
            signal.signal(number, usual)
        self._usual = {}
        failed_at_start = error is not None and not has_begun(self.directory)
        try:
            if failed_at_start:
                self._close_sinks()
                give_back(self.directory)
            else:
                self.finish()
        except Exception:
            if error is None:
                raise
            logger.exception("no report could be written to %s", self.directory)

    def _keep_pending(self, step: int, phase: Phase) -> None:
        """Write the rollouts and the plan that came up since the last `log`."""
        if self._pending_plan is not None:
            PlanRecord.of(self._pending_plan, step).write(self.directory / LENGTHS)
        if self._pending_samples:
            # json escapes to ASCII: a lone surrogate in a model's text can't be written as UTF-8.
            place = {"step": step, "phase": phase}
            lines = [json.dumps(place | asdict(sample)) + "\n" for sample in self._pending_samples]
            with (self.directory / SAMPLES).open("a", encoding="utf-8") as stream:
                stream.writelines(lines)
        self._pending_plan, self._pending_samples = None, []

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Note the first Ctrl-C or SIGTERM, obey the second."""
        if self.interrupted:
            if number == signal.SIGTERM and time.monotonic() - self._interrupted_at < SAME_SIGTERM_S:
                return
            raise KeyboardInterrupt
        self.interrupted, self._interrupted_at = True, time.monotonic()
        # Not through logging or rich: a handler may run in the middle of one of their writes.
        os.write(2, FIRST_INTERRUPT)


def _cut_samples(path: Path, point: ResumePoint | None) -> None:
    """Drop the rollouts kept behind the point where the run goes on; all of them when it begins anew."""
    start = {"step": 0, "phase": "train"}  # of a line that lacks them
    kept = [sample for sample in read_samples(path) if point is not None and point.covers(start | sample)]
    if path.exists():
        path.write_text("".join(json.dumps(sample) + "\n" for sample in kept), encoding="utf-8")
