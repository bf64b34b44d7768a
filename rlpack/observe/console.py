"""What one sees in the terminal: a line a step, a progress bar on long work, a few sampled rollouts."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console as Screen
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from rlpack.observe.shown import reward_form
from rlpack.observe.sinks import Phase
from rlpack.observe.text import shortened, visible

# What a line shows, in this order, of what a step reports: metric, label, format.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("sft_warmup/loss", "loss", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("evaluation/loss", "held-out loss", "{:.3f}"),
    ("evaluation/accuracy_sampled", "held-out sampled", "{:.1%}"),
    ("evaluation/accuracy_best_of_n", "best of n", "{:.1%}"),
    ("evaluation/accuracy_greedy", "greedy", "{:.1%}"),
    ("rollout/response_tokens_mean", "length", "{:.1f}"),
    ("actor/loss", "loss", "{:+.4f}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("actor/kl", "kl", "{:.4f}"),
    ("actor/grad_norm", "grad", "{:.3f}"),
    ("packing/waste_ratio", "waste", "{:.1%}"),
    ("reward/quarantined", "quarantined", "{:.0f}"),
    ("throughput/tokens_per_s", "tok/s", "{:,.0f}"),
    ("time/step_s", "", "{:.2f} s"),
)
# Mean rewards, whose form is that of all of them.
REWARDS = frozenset(name for name, *_ in COLUMNS if name.startswith("evaluation/accuracy"))
TITLES: dict[Phase, str] = {"sft_warmup": "warm-up", "train": "step", "evaluation": "evaluation"}
STYLES: dict[Phase, str] = {"sft_warmup": "yellow", "train": "cyan", "evaluation": "bold green"}
ONLY_IF_SET = frozenset({"reward/quarantined"})
TITLE_WIDTH = 20
SAMPLE_CHARACTERS = 400
PLAIN_PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True)
class Sample:
    """One rollout, as text.

    Attributes:
        prompt: what the policy was given.
        completion: what it answered.
        answer: the right answer, if there is one; what a dataset gives as a number or a list becomes its text.
        reward: its reward; None when it was quarantined.
    """

    prompt: str
    completion: str
    answer: str | None = None
    reward: float | None = None

    def __post_init__(self) -> None:
        """Make text of an answer that isn't."""
        if self.answer is not None:
            object.__setattr__(self, "answer", str(self.answer))


class Progress(Protocol):
    """Work under way."""

    def advance(self, amount: float = 1) -> None:
        """Count `amount` units as done."""
        ...


class Console:
    """Writes to one screen; rich colours on a terminal, plain text in a file or pipe."""

    def __init__(self, screen: Screen | None = None) -> None:
        """Use `screen`, or the standard output."""
        self._screen = Screen(highlight=False) if screen is None else screen
        self.shown_at = time.monotonic()

    def line(self, step: int, phase: Phase, metrics: Mapping[str, float], total: int | None = None) -> None:
        """Show one step on one line."""
        title = f"{TITLES[phase]} {step}" + (f"/{total}" if total else "")
        text = Text(title.ljust(TITLE_WIDTH), style=STYLES[phase])
        rewards = reward_form(value for name, value in metrics.items() if name in REWARDS)
        for name, label, form in COLUMNS:
            if name not in metrics or (name in ONLY_IF_SET and not metrics[name]):
                continue
            text.append("  ")
            text.append(f"{label} " if label else "", style="dim")
            text.append((rewards if name in REWARDS else form).format(metrics[name]), style="default")
        self._show(text)

    def note(self, message: str) -> None:
        """Show a line of our own words."""
        self._show(Text(visible(message)))

    def table(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Show a summary: a label, the figure before and the figure after."""
        labels, before, after = (max(map(len, column), default=0) for column in zip(*rows, strict=True))
        for label, first, last in rows:
            text = Text(f"  {label.ljust(labels)}  ", style="dim")
            text.append(f"{first.rjust(before)} {'→' if first else ' '} ", style="default")
            text.append(last.rjust(after), style="bold")
            self._show(text)

    def show_samples(self, samples: Sequence[Sample], title: str = "samples") -> None:
        """Show rollouts; whatever they contain stays text."""
        if not samples:
            return
        self._show(Text(title, style="bold"))
        for sample in samples:
            reward = "quarantined" if sample.reward is None else f"{sample.reward:g}"
            text = Text.assemble(("  reward ", "dim"), reward)
            if sample.answer is not None:
                text.append("  answer ", style="dim").append(_clean(sample.answer))
            text.append("\n    prompt     ", style="dim").append(_clean(sample.prompt))
            text.append("\n    completion ", style="dim").append(_clean(sample.completion))
            self._show(text)

    @contextmanager
    def progress(self, total: float, description: str) -> Iterator[Progress]:
        """Show how far a piece of long work is: a bar on a terminal, else a line after 10 silent seconds.

        Args:
            total: units of work.
            description: a word or two.
        """
        if not self._screen.is_terminal:
            yield _PlainProgress(self, total, description)
            return
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        with Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._screen, transient=True) as bars:
            yield _Bar(bars, bars.add_task(visible(description), total=total))

    def _show(self, text: Text) -> None:
        """Write a text; it is never wrapped, so a log has one line a step."""
        self._screen.print(text, soft_wrap=True, markup=False, emoji=False)
        self.shown_at = time.monotonic()


class _Bar:
    """Progress drawn by rich."""

    def __init__(self, bars: Bars, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, amount: float = 1) -> None:
        """Move the bar."""
        self._bars.advance(self._task, amount)


class _PlainProgress:
    """Progress as a line now and then, for logs."""

    def __init__(self, console: Console, total: float, description: str) -> None:
        self._console = console
        self._total = total
        self._description = description
        self._done = 0.0

    def advance(self, amount: float = 1) -> None:
        """Count, and say so if the last line was long ago."""
        self._done += amount
        if time.monotonic() - self._console.shown_at >= PLAIN_PROGRESS_EVERY_S:
            self._console.note(f"{self._description}: {self._done:g} of {self._total:g}")


def _clean(text: str) -> str:
    """Return text that can't steer the terminal, of a bearable length."""
    return visible(shortened(text, SAMPLE_CHARACTERS))
