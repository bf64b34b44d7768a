import warnings
from dataclasses import fields
from pathlib import Path

import pytest

from rlpack.observe.names import METRICS, UnknownMetricWarning, check_names, reference
from rlpack.packing.metrics import PackingMetrics

ROOT = Path(__file__).parents[3]


def test_the_reference_page_is_what_the_table_generates() -> None:
    written = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert written == reference(), "run python -m rlpack.observe.names"


def test_an_unknown_name_warns_with_the_place_to_add_it() -> None:
    with pytest.warns(UnknownMetricWarning, match=r"'rewards/mean' is not in rlpack\.observe\.names"):
        check_names(["reward/mean", "rewards/mean"])


def test_known_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_names(METRICS)


def test_the_table_holds_exactly_the_figures_of_a_plan() -> None:
    named = {name.removeprefix("packing/") for name in METRICS if name.startswith("packing/")}
    assert named == {field.name for field in fields(PackingMetrics)}


def test_every_metric_says_its_unit_and_ends_as_its_unit_says() -> None:
    for name, metric in METRICS.items():
        assert metric.unit
        assert metric.description.endswith(".")
        assert name.endswith("_s") == (metric.unit in {"s", "tokens/s"}), name
        assert not name.endswith("fraction") or metric.unit == "fraction"
