import ast
import re
import warnings
from dataclasses import fields
from pathlib import Path

import pytest

from rlpack.observe.metric_entries import METRICS
from rlpack.observe.metric_table import UnknownMetricWarning, check_names, reference
from rlpack.packing.analysis.metrics import PackingMetrics

ROOT = Path(__file__).parents[3]


def test_the_reference_page_is_what_the_table_generates() -> None:
    written = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert written == reference(), "run python -m rlpack.observe.metric_table"


def test_every_row_of_the_reference_page_has_three_cells() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {4}, "| in a description ends its cell"


def test_an_unknown_name_warns_first_with_the_family_of_own_recipes() -> None:
    of_own_recipes = r"unknown metric 'rewards/mean': if your own recipe records it, name it recipe/<name>; .*METRICS"
    with pytest.warns(UnknownMetricWarning, match=of_own_recipes):
        check_names(["reward/mean", "rewards/mean"])


def test_known_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_names(METRICS)


def test_the_table_has_exactly_the_metrics_of_a_plan() -> None:
    named = {name.removeprefix("packing/") for name in METRICS if name.startswith("packing/")}
    assert named == {field.name for field in fields(PackingMetrics)}


def test_every_metric_has_a_unit_that_matches_its_name() -> None:
    for name, metric in METRICS.items():
        assert metric.unit
        assert metric.description.endswith(".")
        is_time = name.endswith(("_s", "time/recipe/<name>", "time/draw/<name>"))
        assert is_time == (metric.unit in {"s", "tokens/s"}), name
        assert not name.endswith("fraction") or metric.unit == "fraction"


FAMILIES = {name.split("/", 1)[0] for name in METRICS if "/" in name}


def texts_and_timers() -> tuple[set[str], set[str]]:
    texts: set[str] = set()
    timers: set[str] = set()
    for folder in ("rlpack", "workers", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            if "observe" in path.parts:  # only displays metrics
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "timer":
                    timers |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return texts, timers


def test_every_metric_that_the_code_names_is_in_the_table() -> None:
    texts, timers = texts_and_timers()
    named = {text for text in texts if re.fullmatch(rf"({'|'.join(FAMILIES)})/[a-z0-9_]*[a-z0-9]", text)}
    named |= {f"time/{timer}_s" for timer in timers}
    assert named
    # The actor measures these in its update; recipes/driver/policy_stages.py logs them under names of the table.
    assert named - {"actor/logprob_gap", "actor/response_kl"} <= METRICS.keys()


def test_every_metric_in_the_table_is_reported_somewhere() -> None:
    texts, timers = texts_and_timers()
    reported = texts | {f"time/{timer}_s" for timer in timers}
    # A trained role logs its metrics under its own name (workers/optimizer_step.py).
    reported |= {f"{role}/{text}" for role in ("actor", "critic") for text in texts}
    reported |= {text.replace("actor/", "sft_warmup/") for text in reported}
    # Evaluations log the same metrics for each of their sets (recipes/driver/evaluation.py).
    reported |= {f"evaluation/{text}" for text in texts}
    names = {name.removesuffix("<name>") for name in METRICS if not name.startswith("packing/")}
    # Those of recipes outside of rlpack (docs/recipes.md).
    assert names - reported <= {"recipe/", "time/recipe/", "time/draw/"}
