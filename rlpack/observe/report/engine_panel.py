"""The panel of engines: requests, tokens per second and use of the KV cache during a run's last steps."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Self

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from rlpack.observe.report.plot_style import (
    BEST,
    FAINT,
    GREEDY,
    LOSS,
    REWARD,
    SAMPLED,
    WASTE,
    despine,
    from_zero,
    sequence_color,
)
from rlpack.observe.report.timeline import Timeline, length, union
from rlpack.observe.trace import DRIVER, ProcessSpans, Values

ENGINE, ROUTER = "engine", "router"
MOST_ENGINES = 8
_COLORS = (REWARD, SAMPLED, GREEDY, LOSS, BEST)


class EnginePanel(NamedTuple):
    """What engines did during a run's last steps.

    Attributes:
        timeline: the steps.
        engines: the values of each engine by its process, cut to the steps.
        queued: rows that waited in the router for an engine.
    """

    timeline: Timeline
    engines: dict[str, list[Values]]
    queued: list[Values]

    @classmethod
    def of(cls, timeline: Timeline, processes: Sequence[ProcessSpans]) -> Self | None:
        """Return the panel of a timeline's steps; None if no engine recorded values."""
        engines: dict[str, list[Values]] = {}
        queued: list[Values] = []
        for one in processes:
            inside = _cut(one.values, timeline.window)
            if one.process == DRIVER:
                queued += [value for value in inside if value.name == ROUTER]
            elif of_engine := [value for value in inside if value.name == ENGINE]:
                engines.setdefault(one.process, []).extend(of_engine)
        return cls(timeline, engines, sorted(queued, key=lambda one: one.begin_us)) if engines else None

    @property
    def shown(self) -> dict[str, list[Values]]:
        """Return the engines that are drawn: the first few."""
        return dict(islice(self.engines.items(), MOST_ENGINES))

    @property
    def has_waiting(self) -> bool:
        """Return whether requests waited, in an engine or in the router."""
        return any(one.values.get("waiting") for values in (self.queued, *self.shown.values()) for one in values)

    def text(self) -> str:
        """Describe how fast each engine was while busy, how long it was busy, and how full its cache got."""
        begin, end = self.timeline.window
        parts = []
        for process, values in self.shown.items():
            busy_us = length(union([(one.begin_us, one.end_us) for one in values]))
            tokens = sum(one.values.get("tokens", 0.0) for one in values)
            part = f"{process} {tokens / max(busy_us / 1e6, 1e-6):,.0f} tokens/s, busy {busy_us / (end - begin):.0%}"
            if full := [one.values["cache"] for one in values if "cache" in one.values]:
                part += f", KV cache at most {max(full):.0%}"
            parts.append(part)
        count = "" if len(self.engines) <= MOST_ENGINES else f" (the first {MOST_ENGINES} of {len(self.engines)})"
        engines = "" if len(self.shown) == 1 else ", stacked by engine"
        drawn = f"requests that run{' and wait' if self.has_waiting else ''}, and tokens per second{engines}"
        return f"{self.timeline.title}: {drawn}. While busy{count}: {'; '.join(parts)}."


def engine_figure(panel: EnginePanel) -> Figure:
    """Draw requests, tokens per second, and use of the KV cache if known, each engine in one color.

    Requests and tokens of engines are stacked, so that none hides another.
    """
    rows = _rows(panel)
    figure = Figure(figsize=(9.2, 1.0 + 1.25 * len(rows)))
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False).ravel()
    begin, end = panel.timeline.window
    for axes, (label, draw) in zip(grid, rows, strict=True):
        draw(axes)
        axes.set_ylabel(label)
        from_zero(axes)
        despine(axes)
        for step in panel.timeline.steps:
            axes.axvline((step.begin_us - begin) / 1e6, color=FAINT, linewidth=0.8)
        axes.set_xlim(0, (end - begin) / 1e6)
    grid[-1].set_xlabel("seconds")
    figure.align_ylabels()
    lines = [Patch(color=_color(row), label=name) for row, name in enumerate(panel.shown)]
    queue = [Patch(color=WASTE, label="waiting for any engine")] if panel.queued and panel.has_waiting else []
    grid[0].legend(handles=[*lines, *queue], loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, fontsize=9)
    return figure


def _rows(panel: EnginePanel) -> list[tuple[str, Callable[[Axes], None]]]:
    """Return label and drawing of each plot, without those that no engine has values for."""
    begin, engines = panel.timeline.window[0], list(panel.shown.values())
    colors = [_color(row) for row in range(len(engines))]

    def stacked(name: str, *below: list[Values]) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            seconds, heights = step_functions([*below, *engines], name, begin)
            axes.stackplot(seconds, heights, step="post", colors=[*(WASTE for _ in below), *colors], linewidth=0)

        return draw

    def cache(axes: Axes) -> None:
        seconds, heights = step_functions(engines, "cache", begin)
        for row, (one, color) in enumerate(zip(heights, colors, strict=True)):
            # Narrower on top, so that equal curves are all visible.
            axes.plot(seconds, one, drawstyle="steps-post", color=color, linewidth=1.4 + 1.2 * (len(engines) - 1 - row))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    rows = [("running", stacked("running"))]
    if panel.has_waiting:
        rows.append(("waiting", stacked("waiting", *([panel.queued] if panel.queued else []))))
    rows.append(("tokens/s", stacked("tokens/s")))
    if any("cache" in one.values for values in engines for one in values):
        rows.append(("KV cache", cache))
    return rows


def step_functions(series: Sequence[Sequence[Values]], name: str, begin_us: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the heights of several step functions at the same times; 0 where nothing was recorded.

    >>> one = [Values("engine", 0, 2_000_000, {"running": 3.0})]
    >>> other = [Values("engine", 1_000_000, 2_000_000, {"running": 1.0})]
    >>> seconds, heights = step_functions([one, other], "running", 0)
    >>> seconds.tolist(), heights.tolist()
    ([0.0, 1.0, 2.0, 3.0], [[3.0, 3.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])

    Returns:
        seconds since `begin_us`, f64 [n]; heights from each time to the next, f64 [series, n].
    """
    times = np.unique([begin_us, *(time for values in series for one in values for time in (one.begin_us, one.end_us))])
    heights = np.zeros((len(series), times.size))
    for row, values in enumerate(series):
        for one in values:
            first, end = np.searchsorted(times, (one.begin_us, one.end_us))
            heights[row, first:end] = one.rates().get(name, 0.0)
    return (times - begin_us) / 1e6, heights


def _cut(values: Sequence[Values], window: tuple[int, int]) -> list[Values]:
    """Return the parts of values that lie in a window; tokens are assumed to be spread evenly over time."""
    cut = []
    for one in values:
        begin, end = max(one.begin_us, window[0]), min(one.end_us, window[1])
        if begin < end:
            share = (end - begin) / one.duration_us
            numbers = {name: value * share if name == "tokens" else value for name, value in one.values.items()}
            cut.append(Values(one.name, begin, end - begin, numbers))
    return cut


def _color(row: int) -> str | tuple[float, float, float]:
    return _COLORS[row] if row < len(_COLORS) else sequence_color(row)
