"""What a run came to, in a few rows: for the cards of the report and the table at the end of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlpack.observe.report.packing_picture import layout_boxes
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.report.plots import ACCURACIES, Records, Series
from rlpack.observe.shown import reward_form


@dataclass(frozen=True)
class Row:
    """One line of a summary.

    Attributes:
        label: what it is.
        before: the first figure, or None where there is only one.
        after: the last, or only, figure.
    """

    label: str
    before: str | None
    after: str

    @property
    def figure(self) -> str:
        """Return both figures as one text."""
        return self.after if self.before is None else f"{self.before} → {self.after}"


def summarise(records: Records, plans: PlanRecord | None) -> list[Row]:
    """Return reward and accuracies (first and last), wasted slots (padded and as batched), steps and time."""
    rows = [*_curve(records, "reward/mean", "train", "mean reward", "first and last step", "{:.3f}")]
    form = reward_form(record[name] for record in records for name, *_ in ACCURACIES if name in record)
    for name, label, *_ in ACCURACIES:
        rows += _curve(records, name, "evaluation", label, "before and after", form)
    if plans is not None:
        padded, used = (layout_boxes(plan, 0).waste for plan in (plans.plan("fixed"), plans.plan()))
        rows.append(Row(f"wasted slots, padded and {plans.batching.mode}", f"{padded:.1%}", f"{used:.1%}"))
    steps = {record["step"] for record in records if record["phase"] == "train"}
    rows.append(Row("training steps", None, f"{max(steps, default=0):,}"))
    if records:
        rows.append(Row("time until the last record", None, duration(max(record["time_s"] for record in records))))
    return rows


def duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> duration(75.2), duration(4000)
    ('1 min 15 s', '1 h 6 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def _curve(records: Records, name: str, phase: str, label: str, both: str, form: str) -> Sequence[Row]:
    """Return the first and last figure of a metric, or the only one, if it was logged; `both` says which two."""
    values = [form.format(value) for value in Series.of(records, name, phase).values]
    if len(values) < 2:
        return [Row(label, None, value) for value in values]
    return [Row(f"{label}, {both}", values[0], values[-1])]
