"""Terminal output: one line per step, a progress bar for long work, a few sampled rollouts."""

import errno
import io
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rlpack.observe.errors import StandardOutputClosedError
from rlpack.observe.sinks import LogPhase
from rlpack.observe.terminal import STANDARD_OUTPUT, discard, leave_closed_terminal
from rlpack.observe.text import are_accuracies, mean_reward_format, shortened, visible

logger = logging.getLogger(__name__)

# The metrics on a step's line, in order: metric, label, format.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("sft_warmup/loss", "loss", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("evaluation/loss", "held-out loss", "{:.3f}"),
    ("evaluation/reward_sampled", "held-out {noun}", ""),
    ("evaluation/reward_best_of_n", "best of n", ""),
    ("evaluation/reward_greedy", "greedy", ""),
    ("rollout/response_tokens_mean", "length", "{:.1f}"),
    ("actor/loss", "loss", "{:+.4f}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("actor/kl", "kl", "{:.4f}"),
    ("actor/grad_norm", "grad", "{:.3f}"),
    ("packing/waste_ratio", "waste", "{:.1%}"),
    ("reward/quarantined", "quarantined", "{:.0f}"),
    ("evaluation/quarantined", "quarantined", "{:.0f}"),
    ("throughput/tokens_per_s", "tok/s", "{:,.0f}"),
    ("time/step_s", "", "{:.2f} s"),
)
# Held-out mean rewards: in percent if they are accuracies, else decimal.
MEAN_REWARDS = frozenset(name for name, *_ in COLUMNS if name.startswith("evaluation/reward"))
TITLES: dict[LogPhase, str] = {"sft_warmup": "warm-up", "train": "step", "evaluation": "evaluation"}
STYLES: dict[LogPhase, str] = {"sft_warmup": "yellow", "train": "cyan", "evaluation": "bold green"}
HIDDEN_IF_ZERO = frozenset({"reward/quarantined", "evaluation/quarantined"})
TITLE_WIDTH = 20
SAMPLE_CHARACTERS = 400
PLAIN_PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True)
class Sample:
    """One rollout as text.

    Attributes:
        prompt: the policy's input.
        completion: the policy's response.
        answer: the correct answer, if there is one; numbers and lists from a dataset become text.
        reward: its reward; None if it was quarantined.
    """

    prompt: str
    completion: str
    answer: str | None = None
    reward: float | None = None

    def __post_init__(self) -> None:
        """Convert the answer to text."""
        if self.answer is not None:
            object.__setattr__(self, "answer", str(self.answer))


class _Output(RichConsole):
    """A rich console that raises on a closed pipe, instead of exiting with code 1 and no message.

    Attributes:
        needs_reader: false lets it discard what no one reads any more.
    """

    needs_reader = True

    def on_broken_pipe(self) -> None:
        """Raise, or discard all further output.

        Raises:
            StandardOutputClosedError: `needs_reader` is true.
        """
        if not self.needs_reader:
            discard(STANDARD_OUTPUT)
            return
        raise StandardOutputClosedError(errno.EPIPE, "standard output is closed")


class ProgressBar(Protocol):
    """Shows the progress of long work."""

    def advance(self, amount: float = 1) -> None:
        """Count `amount` units as done."""
        ...


class Console:
    """Prints in color to a terminal, else as plain text."""

    def __init__(self, output: RichConsole | None = None) -> None:
        """Print to `output`; the default is standard output, which then escapes characters that it can't encode."""
        if output is None and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        self._output = _Output(highlight=False) if output is None else output
        self.last_printed_at = time.monotonic()

    def go_on_without_reader(self) -> None:
        """Make a closed standard output no error from now on, if that is where this prints."""
        if isinstance(self._output, _Output):
            self._output.needs_reader = False

    def is_silent(self) -> bool:
        """Return whether nothing was printed for 10 s."""
        return time.monotonic() - self.last_printed_at >= PLAIN_PROGRESS_EVERY_S

    def line(self, step: int, phase: LogPhase, metrics: Mapping[str, float], total: int | None = None) -> None:
        """Print a line with the metrics of a step, and a further line for each evaluation set."""
        self._metrics(f"{TITLES[phase]} {step}" + (f"/{total}" if total else ""), phase, metrics)
        of_sets: dict[str, dict[str, float]] = {}
        for key, value in metrics.items():
            if key.startswith("evaluation/") and key.count("/") == 2:
                _, name, metric = key.split("/")
                of_sets.setdefault(name, {})[f"evaluation/{metric}"] = value
        shown = {name for name, *_ in COLUMNS}
        for name, own in of_sets.items():
            if not shown.isdisjoint(own):
                self._metrics(f"  {name}", phase, own)

    def _metrics(self, title: str, phase: LogPhase, metrics: Mapping[str, float]) -> None:
        text = Text(title.ljust(TITLE_WIDTH), style=STYLES[phase])
        is_accuracy = are_accuracies([metrics])
        noun, held_out_format = "accuracy" if is_accuracy else "reward", mean_reward_format(is_accuracy=is_accuracy)
        for name, label, number_format in COLUMNS:
            if name not in metrics or (name in HIDDEN_IF_ZERO and not metrics[name]):
                continue
            text.append("  ")
            text.append(f"{label.format(noun=noun)} " if label else "", style="dim")
            value_format = held_out_format if name in MEAN_REWARDS else number_format
            text.append(value_format.format(metrics[name]), style="default")
        self._print(text)

    def note(self, message: str) -> None:
        """Print a message."""
        self._print(Text(visible(message)))

    def table(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Print a summary of (label, value before or empty, value after)."""
        labels, before, after = (max(map(len, column), default=0) for column in zip(*rows, strict=True))
        for label, first, last in rows:
            text = Text(f"  {label.ljust(labels)}  ", style="dim")
            text.append(f"{first.rjust(before)} {'→' if first else ' '} ", style="default")
            text.append(last.rjust(after), style="bold")
            self._print(text)

    def columns(self, rows: Sequence[Sequence[str]]) -> None:
        """Print rows of cells, the header first; cells are right-aligned, a row's first and last ones left-aligned."""
        widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
        for number, (label, *cells, text) in enumerate(rows):
            aligned = "".join(f"  {cell.rjust(width)}" for cell, width in zip(cells, widths[1:], strict=False))
            line = f"  {label.ljust(widths[0])}{aligned}  {text}".rstrip()
            self._print(Text(line, style="default" if number else "dim"))

    def show_samples(self, samples: Sequence[Sample], title: str = "samples") -> None:
        """Print rollouts; their text is escaped."""
        if not samples:
            return
        self._print(Text(title, style="bold"))
        for sample in samples:
            reward = "quarantined" if sample.reward is None else f"{sample.reward:g}"
            text = Text.assemble(("  reward ", "dim"), reward)
            if sample.answer is not None:
                text.append("  answer ", style="dim").append(_safe(sample.answer))
            text.append("\n    prompt     ", style="dim").append(_safe(sample.prompt))
            text.append("\n    completion ", style="dim").append(_safe(sample.completion))
            self._print(text)

    @contextmanager
    def progress(self, total: float, description: str, *, plain: bool = True) -> Iterator[ProgressBar]:
        """Show progress as a bar.

        Args:
            total: units of work.
            description: a word or two.
            plain: whether, outside a terminal, a line is printed after 10 s without output.
        """
        if not self._output.is_terminal:
            yield _PlainProgress(self, total, description) if plain else _NoProgress()
            return
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        times = TimeElapsedColumn(), TimeRemainingColumn()
        with Progress(*columns, *times, console=self._output, transient=True) as progress:
            yield _RichProgress(progress, progress.add_task(visible(description), total=total))

    def _print(self, text: Text) -> None:
        """Print text without wrapping, so that a log has one line per step.

        A closed terminal is not an error. Any other output error, except for a closed pipe, causes a warning.
        """
        try:
            self._output.print(text, soft_wrap=True, markup=False, emoji=False)
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.errno == errno.EIO:
                leave_closed_terminal()
            else:
                discard(STANDARD_OUTPUT)
                reason = error.strerror or error
                logger.warning("standard output can't be written (%s), so nothing more is printed", reason)
        self.last_printed_at = time.monotonic()


class _RichProgress:
    """Progress as a bar, drawn by rich."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: float = 1) -> None:
        """Move the bar."""
        self._progress.advance(self._task, amount)


class _NoProgress:
    """Shows nothing, because other lines show the progress."""

    def advance(self, amount: float = 1) -> None:
        """Do nothing."""


class _PlainProgress:
    """Progress as an occasional line, for logs."""

    def __init__(self, console: Console, total: float, description: str) -> None:
        self._console = console
        self._total = total
        self._description = description
        self._done = 0.0

    def advance(self, amount: float = 1) -> None:
        """Count, and print a line if the last output was long ago."""
        self._done += amount
        if self._console.is_silent():
            self._console.note(f"{self._description}: {self._done:g} of {self._total:g}")


def _safe(text: str) -> str:
    """Return text escaped for the terminal, at a limited length."""
    return visible(shortened(text, SAMPLE_CHARACTERS))
