"""The curves and bars of the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlpack.observe.metric_entries import METRICS
from rlpack.observe.report.plot_style import BEST, FAINT, GREEDY, LOSS, REWARD, SAMPLED, despine, from_zero
from rlpack.observe.text import are_accuracies

Records = Sequence[dict[str, Any]]
SIZE = (9.2, 3.6)
HEALTH = (
    "actor/loss",
    "actor/entropy",
    "actor/kl",
    "actor/grad_norm",
    "actor/clip_high_fraction",
    "rollout/logprob_gap",
    "rollout/response_tokens_mean",
    "packing/waste_ratio",
    "throughput/tokens_per_s",
)


@dataclass(frozen=True)
class Series:
    """The values of one metric in one phase.

    Attributes:
        steps: the steps that logged it, int64 [n].
        values: its values, f64 [n].
    """

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, records: Records, name: str, phase: str) -> "Series":
        """Return the finite values of a metric."""
        points = [(r["step"], r[name]) for r in records if r["phase"] == phase and np.isfinite(r.get(name, np.nan))]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return cls(np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64))

    def __len__(self) -> int:
        return self.steps.size


def running_mean(values: np.ndarray, half: int) -> np.ndarray:
    """Return the mean of each value, `half` values before it and as many after it.

    Near the ends, both sides are shortened equally, so the mean neither lags nor leads.

    >>> running_mean(np.array([1.0, 3.0, 8.0, 10.0]), 1).tolist()
    [1.0, 4.0, 7.0, 10.0]
    """
    sums = np.cumsum(np.concatenate(([0.0], values)))
    places = np.arange(values.size)
    sides = np.minimum(half, np.minimum(places, places[::-1]))
    return (sums[places + sides + 1] - sums[places - sides]) / (2 * sides + 1)


def held_out_noun(records: Records) -> str:
    """Return the name of held-out mean rewards: "accuracy" if every reward is 0 or 1, else "mean reward"."""
    return "accuracy" if are_accuracies(records) else "mean reward"


def held_out_curves(records: Records) -> tuple[tuple[str, str, str, str], ...]:
    """Return metric, label, color and line style of each held-out mean reward."""
    return (
        ("evaluation/reward_sampled", f"held-out {held_out_noun(records)}, sampled", SAMPLED, "o-"),
        ("evaluation/reward_best_of_n", "held-out, best of n samples", BEST, "^--"),
        ("evaluation/reward_greedy", "held-out, greedy", GREEDY, "s--"),
    )


def rewards(records: Records) -> Figure | None:
    """Plot training and held-out rewards; None if not logged."""
    figure = Figure(figsize=SIZE)
    axes = figure.add_subplot()
    reward = Series.of(records, "reward/mean", "train")
    if len(reward):
        half = min(5, len(reward) // 8)
        label = "reward of a step, training"
        (each,) = axes.plot(reward.steps, reward.values, color=REWARD, linewidth=2.2, label=label)
        if half:
            each.set(alpha=0.3, linewidth=1)
            smooth, label = running_mean(reward.values, half), f"reward, training (mean of {2 * half + 1} steps)"
            axes.plot(reward.steps, smooth, color=REWARD, linewidth=2.2, label=label)
    for name, label, color, line in held_out_curves(records):
        series = Series.of(records, name, "evaluation")
        if len(series):
            axes.plot(series.steps, series.values, line, color=color, markersize=5, linewidth=1.8, label=label)
    if not axes.get_lines():
        return None
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()])
    if are_accuracies(records) and ((values >= 0) & (values <= 1)).all():
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _format_steps(axes)
    axes.set_ylabel("reward, accuracy" if are_accuracies(records) else "reward")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, borderaxespad=0)
    return figure


def sft_warmup_loss(records: Records) -> Figure | None:
    """Plot the loss of the supervised warm-up; None without one."""
    loss = Series.of(records, "sft_warmup/loss", "sft_warmup")
    if not len(loss):
        return None
    figure = Figure(figsize=(SIZE[0], 2.4))
    axes = figure.add_subplot()
    axes.plot(loss.steps, loss.values, color=LOSS, linewidth=1.6)
    axes.set_ylabel("loss (nats per token)")
    from_zero(axes)
    _format_steps(axes, "warm-up step")
    return figure


def supervised_loss(records: Records) -> Figure | None:
    """Plot training and held-out loss of supervised fine-tuning; None without held-out losses."""
    held_out = Series.of(records, "evaluation/loss", "evaluation")
    if not len(held_out):
        return None
    figure = Figure(figsize=SIZE)
    axes = figure.add_subplot()
    training = Series.of(records, "actor/loss", "train")
    axes.plot(training.steps, training.values, color=LOSS, linewidth=1.4, alpha=0.6, label="loss of a step, training")
    axes.plot(held_out.steps, held_out.values, "o-", color=SAMPLED, markersize=5, linewidth=1.8, label="held-out loss")
    axes.set_ylabel("loss (nats per token)")
    from_zero(axes)
    _format_steps(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, borderaxespad=0)
    return figure


def policy_health(records: Records) -> Figure | None:
    """Plot the metrics that show a run's health, without constant ones; None if nothing is left."""
    curves = {name: series for name, series in _health(records).items() if not _is_constant(series)}
    if not curves:
        return None
    lines = -(-len(curves) // 2)
    figure = Figure(figsize=(SIZE[0], 2.1 * lines), layout="constrained")
    grid = figure.subplots(lines, 2, squeeze=False).ravel()
    for axes, (name, series) in zip(grid, curves.items(), strict=False):
        axes.plot(series.steps, series.values, color=REWARD, linewidth=1.5)
        unit = METRICS[name].unit
        axes.set_title(name + ("" if unit == "1" else f" ({unit})"), fontsize=10)
        _format_values(axes, series.values)
        _format_steps(axes)
    for axes in grid[len(curves) :]:
        axes.set_visible(False)
    return figure


def health_text(records: Records) -> str:
    """Return what `policy_health` shows, and the values of the constant metrics, which it leaves out."""
    constant = [f"{name} {one.values[0]:g}" for name, one in _health(records).items() if _is_constant(one)]
    text = "Metrics of the policy's training and generation."
    return f"{text} The same in all steps: {', '.join(constant)}." if constant else text


def _health(records: Records) -> dict[str, Series]:
    return {name: series for name in HEALTH if len(series := Series.of(records, name, "train"))}


def _is_constant(series: Series) -> bool:
    return len(series) > 1 and bool((series.values == series.values[0]).all())


def _format_values(axes: Axes, values: np.ndarray) -> None:
    """Write each tick's whole value: an offset or a power above the axis would collide with the title."""
    axes.ticklabel_format(axis="y", useOffset=False)
    peak = np.abs(values).max()
    if 0 < peak < 1e-3 or peak >= 1e6:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _format_steps(axes: Axes, label: str = "step") -> None:
    """Label the x axis with whole steps."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel(label, color=FAINT)
    despine(axes)
