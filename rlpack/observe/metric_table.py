"""Every logged name has to be in the table of metrics, from which the reference page is generated.

`python -m rlpack.observe.metric_table` writes docs/reference/metrics.md.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path

from rlpack.observe.metric_entries import METRICS, Metric

_WILDCARD = "<name>"
REFERENCE = Path("docs/reference/metrics.md")


class UnknownMetricWarning(UserWarning):
    """A metric was logged that is not in the table."""


def unknown_names(names: Iterable[str]) -> list[str]:
    """Return the names that are not in the table, sorted.

    >>> unknown_names(["reward/mean", "rewards/mean"])
    ['rewards/mean']
    """
    prefixes = tuple(name.removesuffix(_WILDCARD) for name in METRICS if name.endswith(_WILDCARD))
    return sorted(name for name in set(names) - METRICS.keys() if not name.startswith(prefixes))


def check_names(names: Iterable[str]) -> None:
    """Warn about names that are not in the table.

    rlpack's tests turn the warning into an error.
    """
    for name in unknown_names(names):
        text = (
            f"unknown metric {name!r}: if your own recipe records it, name it recipe/<name>; if rlpack does, add its "
            "unit and description to rlpack.observe.metric_entries.METRICS"
        )
        warnings.warn(text, UnknownMetricWarning, stacklevel=3)


def reference() -> str:
    """Return the reference page as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Every record of `metrics.jsonl` is one JSON object: `step`, `phase` (`sft_warmup`, `train` or `evaluation`),",
        "`time_s` (seconds of running time since the start, without pauses before a resume) and the metrics below.",
        'Values that are not finite are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. TensorBoard',
        "and W&B use the same names, prefixed with `<phase>/`.",
        "",
        "This page is generated from `rlpack/observe/metric_entries.py` by `python -m rlpack.observe.metric_table`.",
    ]
    families: dict[str, dict[str, Metric]] = {}
    for name, metric in METRICS.items():
        families.setdefault(name.split("/", 1)[0] if "/" in name else "counters", {})[name] = metric
    for heading, metrics in families.items():
        lines += ["", f"## {heading}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {metric.unit} | {metric.description} |" for name, metric in metrics.items()]
    return "\n".join(lines) + "\n"


def write_reference(path: Path = REFERENCE) -> None:
    """Write the reference page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    write_reference()
