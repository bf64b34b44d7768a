"""Where the time of a run's steps went: the parts of the steps, what came between, and what ran at the same time."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from matplotlib.figure import Figure

from rlpack.observe.draw_times import is_of_draw
from rlpack.observe.report.plot_style import FAINT, REWARD, WASTE, despine

Records = Sequence[Mapping[str, Any]]
OTHER = "other"
# Only steps with `trainer.lead` have this part; their batches are drawn while other steps train.
_WAIT = "wait"
# Training waits for checkpoints between steps; the next record has the time.
_BETWEEN = "checkpoint"
# Records have milliseconds.
_ROUNDING_S = 0.01
# The calls that needed a restart include its time.
_INCLUDED = "restart"


class StepTimes(NamedTuple):
    """Seconds of a whole run by part.

    Attributes:
        parts: what followed each other: the parts of steps, and evaluations and checkpoints between steps. Their sum is
            the time of all steps and of what was between them.
        meanwhile: what ran while steps trained: drawing of batches, and evaluations.
        included: what other parts include.
    """

    parts: dict[str, float]
    meanwhile: dict[str, float]
    included: dict[str, float]

    @classmethod
    def of(cls, records: Records) -> Self:
        """Return the times of a run's records, longest parts first, the rest of the steps last."""
        parts: defaultdict[str, float] = defaultdict(float)
        meanwhile: defaultdict[str, float] = defaultdict(float)
        included: defaultdict[str, float] = defaultdict(float)
        for record, runs_meanwhile in _with_overlap(records):
            times = _times(record)
            step_s = times.pop("step", None)
            parts[_BETWEEN] += times.pop(_BETWEEN, 0.0)
            included[_INCLUDED] += times.pop(_INCLUDED, 0.0)
            if record["phase"] == "evaluation":  # the parts of an evaluation are included in it
                (meanwhile if runs_meanwhile else parts)["evaluate"] += times.get("evaluate", 0.0)
                parts["sync"] += times.get("sync", 0.0)  # before the first evaluation
            elif record["phase"] == "sft_warmup":
                parts["warm-up"] += sum(times.values()) if step_s is None else step_s
            else:
                drawn = {name for name in times if _WAIT in times and is_of_draw(name)}
                for name, seconds in times.items():
                    (meanwhile if name in drawn else parts)[name] += seconds
                own_s = sum(seconds for name, seconds in times.items() if name not in drawn)
                parts[OTHER] += 0.0 if step_s is None else max(0.0, step_s - own_s)
        return cls(*(_longest_first(seconds) for seconds in (parts, meanwhile, included)))

    def text(self) -> str:
        """Describe what the bars are."""
        text = "100 % is the time of all steps, and of evaluations and checkpoints between them."
        if self.meanwhile:
            text += " Batches that were drawn ahead, and evaluations that the run didn't wait for, are not part of it."
        return text


def time_by_part(times: StepTimes) -> Figure | None:
    """Plot the time of each part of a step; None without timers."""
    total = sum(times.parts.values())
    if not total:
        return None
    rows = [
        *((name, seconds, REWARD, f"({seconds / total:.0%})") for name, seconds in times.parts.items()),
        *((name, seconds, FAINT, "while other steps train") for name, seconds in times.meanwhile.items()),
        *((name, seconds, WASTE, "included in other parts") for name, seconds in times.included.items()),
    ]
    figure = Figure(figsize=(9.2, 0.75 + 0.36 * len(rows)))
    axes = figure.add_subplot()
    names, seconds, colors, notes = zip(*rows, strict=True)
    # By position, since a part may be both between steps and meanwhile.
    bars = axes.barh(range(len(rows)), seconds, color=colors, height=0.66)
    axes.bar_label(bars, [f"  {value:,.1f} s  {note}" for value, note in zip(seconds, notes, strict=True)])
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    has_notes = bool(times.meanwhile or times.included)
    axes.set_xlim(0, max(seconds) * (1.55 if has_notes else 1.2))
    axes.set_xlabel("seconds over the whole run")
    axes.tick_params(axis="y", length=0)
    despine(axes, grid="x")
    return figure


def _with_overlap(records: Records) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield each record, and whether it was logged while the next training step was in progress."""
    began_s = float("inf")  # of the next training step
    pairs: list[tuple[Mapping[str, Any], bool]] = []
    for record in reversed(records):
        pairs.append((record, record["time_s"] > began_s + _ROUNDING_S))
        if record["phase"] == "train":
            began_s = record["time_s"] - record.get("time/step_s", 0.0)
    yield from reversed(pairs)


def _times(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a record by part."""
    values = {name.removeprefix("time/"): value for name, value in record.items() if name.startswith("time/")}
    return {name.removesuffix("_s"): value for name, value in values.items()}


def _longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that took time."""
    in_order = sorted(seconds.items(), key=lambda item: (item[0] == OTHER, -item[1]))
    return {name: value for name, value in in_order if value > 0}
