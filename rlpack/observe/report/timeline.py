"""The timeline of a run's last steps: what each process did, and how much of generation overlapped with training."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rlpack.observe.report.plot_style import BEST, FAINT, GREEDY, LOSS, REWARD, SAMPLED, WASTE, despine
from rlpack.observe.trace import DRIVER, MAIN_THREAD, Kind, ProcessSpans, Span, train_steps

STEPS = 3
# Bytes read from the end of each span file; they hold three steps unless these have some ten thousand microbatches.
LAST_BYTES = 2 * 2**20
MOST_ROWS = 16
COLORS: dict[Kind, str] = {
    "generation": REWARD,
    "scoring": GREEDY,
    "log-probs": BEST,
    "update": SAMPLED,
    "weights": LOSS,
    "checkpoint": FAINT,
    "other": WASTE,
}
_TRAINING: tuple[Kind, ...] = ("log-probs", "update")

Interval = tuple[int, int]


class Timeline(NamedTuple):
    """The last steps of a run.

    Attributes:
        steps: the steps, in order.
        ranks: the processes that ran during them, without the driver.
    """

    steps: list[Span]
    ranks: list[ProcessSpans]

    @classmethod
    def of(cls, processes: Sequence[ProcessSpans]) -> "Timeline | None":
        """Return the timeline of the last steps; None if no step was recorded, or no process but the driver ran.

        They are steps of one driver, the newest that recorded any: hours may pass before a run is resumed.
        """
        by_driver = [steps for one in processes if (steps := train_steps([one]))]
        if not by_driver:
            return None
        steps = max(by_driver, key=lambda steps: steps[-1].begin_us)[-STEPS:]
        begin, end = steps[0].begin_us, steps[-1].end_us
        ranks = [one for one in processes if one.process != DRIVER]
        ranks = [one for one in ranks if any(s.end_us > begin and s.begin_us < end for s in one.spans)]
        return cls(steps, ranks) if ranks else None

    @property
    def window(self) -> Interval:
        """Return begin and end, in microseconds since the epoch."""
        return self.steps[0].begin_us, self.steps[-1].end_us

    @property
    def title(self) -> str:
        """Return which steps they are, in words."""
        return "The last step" if len(self.steps) == 1 else f"The last {len(self.steps)} steps"

    def calls(self, process: ProcessSpans) -> list[Span]:
        """Return the calls of a process during the steps, of all its threads, the main one last."""
        begin, end = self.window
        threads = sorted({span.thread for span in process.spans}, key=lambda name: (name == MAIN_THREAD, name))
        calls = [call for thread in threads for call in process.outermost(thread)]
        return [call for call in calls if call.end_us > begin and call.begin_us < end]

    def busy(self, kinds: Sequence[Kind]) -> list[Interval]:
        """Return when some process ran a call of these kinds."""
        return union([(s.begin_us, s.end_us) for one in self.ranks for s in self.calls(one) if s.kind in kinds])

    def text(self) -> str:
        """Describe how busy each process was, and how much of generation overlapped with training."""
        begin, end = self.window
        shares = []
        for one in self.ranks[:MOST_ROWS]:
            calls = union([_cut((call.begin_us, call.end_us), begin, end) for call in self.calls(one)])
            shares.append(f"{one.process} {length(calls) / (end - begin):.0%}")
        generation = [_cut(interval, begin, end) for interval in self.busy(["generation"])]
        text = f"{self.title}. Share of time in which each process was busy: {', '.join(shares)}."
        if length(generation):
            both = length(intersection(generation, self.busy(_TRAINING))) / length(generation)
            text += f" Log-probs and updates ran during {both:.0%} of generation."
        return text


def timeline_figure(timeline: Timeline) -> Figure:
    """Draw one row per process; vertical lines mark the beginnings of steps."""
    begin, end = timeline.window
    ranks = timeline.ranks[:MOST_ROWS]
    figure = Figure(figsize=(9.2, 1.3 + 0.42 * len(ranks)))
    axes = figure.add_subplot()
    used: set[Kind] = set()
    for row, one in enumerate(ranks):
        # Later kinds cover earlier ones, as later calls do. One collection per kind: engines have thousands of calls.
        for kind, calls in _by_kind(timeline.calls(one)).items():
            cut = [_cut((call.begin_us, call.end_us), begin, end) for call in calls]
            seconds = [((left - begin) / 1e6, (right - left) / 1e6) for left, right in cut]
            axes.broken_barh(seconds, (row - 0.36, 0.72), color=COLORS[kind])
            used.add(kind)
    for step in timeline.steps:
        axes.axvline((step.begin_us - begin) / 1e6, color=FAINT, linewidth=0.8)
    axes.set_yticks(range(len(ranks)), [one.process for one in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, (end - begin) / 1e6)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in used]
    axes.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(patches), fontsize=9)
    despine(axes, grid="x")
    return figure


def _by_kind(calls: Sequence[Span]) -> dict[Kind, list[Span]]:
    """Return the calls of each kind, the kind of the last call last."""
    found: dict[Kind, list[Span]] = {}
    for call in reversed(calls):
        found.setdefault(call.kind, []).append(call)
    return dict(reversed(found.items()))


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same points, in order.

    >>> union([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the points in both of two lists of disjoint intervals.

    >>> intersection([(0, 3), (5, 7)], [(2, 6)])
    [(2, 3), (5, 6)]
    """
    both = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return sorted((begin, end) for begin, end in both if begin < end)


def length(intervals: Sequence[Interval]) -> int:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def _cut(interval: Interval, begin: int, end: int) -> Interval:
    return max(begin, interval[0]), min(end, interval[1])
