"""The summary of a run in a few rows: the cards of the report, and the table printed at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpack.observe.metric_entries import METRICS
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.report.plots import Records, Series, held_out_curves
from rlpack.observe.text import are_accuracies, mean_reward_format

# Plan metrics that are 0 if nothing is lost, each with the mean up to which its loss is too small to be explained.
PACKING_LOSSES = {
    "packing/waste_ratio": 0.01,
    "packing/rank_imbalance": 0.05,
    "packing/lockstep_overhead": 0.05,
    "packing/overlong": 0.0,
    "packing/dropped": 0.0,
    "packing/truncated_tokens": 0.0,
    "packing/search_limit_hits": 0.0,
    "packing/groups_split": 0.0,
}


@dataclass(frozen=True)
class SummaryRow:
    """One row of a summary.

    Attributes:
        label: name of the value.
        before: the first value, or None if there is only one.
        after: the last, or only, value.
    """

    label: str
    before: str | None
    after: str

    @property
    def text(self) -> str:
        """Return both values as text."""
        return self.after if self.before is None else f"{self.before} → {self.after}"


def summarize(records: Records, plans: PlanRecord | None) -> list[SummaryRow]:
    """Return rewards, held-out losses, wasted slots, steps and time.

    Rewards are the first and the last value. Wasted slots are those of padded rows and those of the run's batching.
    """
    rows = [*_curve(records, "reward/mean", "train", "mean reward", "first and last step", "{:.3f}")]
    value_format = mean_reward_format(is_accuracy=are_accuracies(records))
    for name, label, *_ in held_out_curves(records):
        rows += _curve(records, name, "evaluation", label, "before and after", value_format)
    rows += _curve(records, "evaluation/loss", "evaluation", "held-out loss", "before and after", "{:.3f}")
    rows += _curve(records, "evaluation/perplexity", "evaluation", "held-out perplexity", "before and after", "{:.2f}")
    if plans is not None:
        padded, used = (plan.metrics.waste_ratio for plan in (plans.plan("fixed"), plans.plan()))
        rows.append(SummaryRow(f"wasted slots, padded and {plans.batching.mode}", f"{padded:.1%}", f"{used:.1%}"))
    steps = {record["step"] for record in records if record["phase"] == "train"}
    rows.append(SummaryRow("training steps", None, f"{max(steps, default=0):,}"))
    if records:
        rows.append(SummaryRow("run time", None, duration(max(record["time_s"] for record in records))))
    return rows


def packing_table(records: Records) -> list[list[str]]:
    """Return a table of the plan metrics: lowest, mean and highest value over the training steps.

    The last column explains a metric that shows a loss. Metrics that are 0 in all steps share the last row. The first
    row is the header; without training steps that have such metrics, the table is empty.
    """
    names = [name for name in METRICS if name.startswith("packing/")]
    values = {name: of_steps for name in names if (of_steps := Series.of(records, name, "train").values).size}
    rows = [_over_steps(name, of_steps) for name, of_steps in values.items() if of_steps.any()]
    if zeros := [name for name, of_steps in values.items() if not of_steps.any()]:
        rows.append(["0 in all steps", "0", "0", "0", ", ".join(zeros)])
    return [["over training steps", "lowest", "mean", "highest", ""], *rows] if rows else []


def _over_steps(name: str, values: np.ndarray) -> list[str]:
    numbers = (f"{number:,.4g}" for number in (values.min(), values.mean(), values.max()))
    is_loss = name in PACKING_LOSSES and values.mean() > PACKING_LOSSES[name]
    return [name, *numbers, METRICS[name].description if is_loss else ""]


def duration(seconds: float) -> str:
    """Return a time in readable units.

    >>> duration(75.2), duration(4000)
    ('1 min 15 s', '1 h 6 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def _curve(records: Records, name: str, phase: str, label: str, both: str, value_format: str) -> Sequence[SummaryRow]:
    """Return the first and last value of a metric, or the only one.

    `both` describes the two values.
    """
    values = [value_format.format(value) for value in Series.of(records, name, phase).values]
    if len(values) < 2:
        return [SummaryRow(label, None, value) for value in values]
    return [SummaryRow(f"{label}, {both}", values[0], values[-1])]
