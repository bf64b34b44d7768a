"""Suggestions: what is tried, in which order, and that the overrides that are printed fit."""

import re
from typing import Any

import pytest

from rlpack.config.compose import compose
from rlpack.config.schema import Actor, Config, Data, Placement, Pool, Trainer
from rlpack.packing import Batching
from rlpack.recipes.dry_run import suggest_layouts
from rlpack.recipes.dry_run.estimate_run import Estimator, open_estimator
from rlpack.recipes.dry_run.suggest_layouts import candidates, main
from tests.builders import tiny_config

DATA = Data(generator={"train_size": 32, "validation_size": 4}, completion_column="demonstration", max_prompt_tokens=64)


def config(ranks: int = 4, **sections: Any) -> Config:
    placement = Placement(pools={"main": Pool(ranks=ranks, gpus_per_rank=1.0)}, address="auto")
    trainer, actor = Trainer(prompts_per_step=64), Actor(isolation_check=False)
    batching = Batching(max_tokens=512)
    return tiny_config(
        "sft",
        **({"data": DATA, "trainer": trainer, "actor": actor, "batching": batching, "placement": placement} | sections),
    )


def test_layouts_divide_ranks_and_model_and_budgets_hold_the_longest_row():
    given = config()
    estimator = open_estimator(given, 80)
    found = list(candidates(given, estimator, tflops=100.0, overhead_ms=1.0))
    # Replicas, cp, tp: products that divide 4 ranks; two key and value heads allow no tp of 4.
    layouts = {each.layout for each in found}
    assert layouts == {
        (1, 1, 1),
        (2, 1, 1),
        (4, 1, 1),
        (1, 2, 1),
        (2, 2, 1),
        (1, 4, 1),
        (1, 1, 2),
        (2, 1, 2),
        (1, 2, 2),
    }
    longest = estimator.batch(given).longest
    budgets = {each.values["batching.max_tokens"] for each in found}
    assert min(budgets) >= longest / 4
    assert max(budgets) <= 2048
    seconds = {each.values["actor.gradient_checkpointing"]: each.seconds for each in found if each.layout == (1, 1, 1)}
    assert seconds["full"] > seconds["none"] == seconds["selective"]


def test_the_fastest_that_fit_are_printed_with_overrides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    tried = []
    memory = Estimator.memory

    def noted(self: Estimator, variant: Config) -> Any:
        tried.append(variant)
        return memory(self, variant)

    monkeypatch.setattr(Estimator, "memory", noted)
    monkeypatch.setattr(suggest_layouts, "_MOST", 2)
    assert main(config(2), 80, None, 10.0, print)
    assert len(tried) <= 4  # the first ones fit, and each of their kind with the least memory
    shown = capsys.readouterr().out
    assert "knows neither network nor kernels" in shown
    lines = re.findall(r"^(\d): (.*)$", shown, re.MULTILINE)
    assert [number for number, _ in lines] == ["1", "2"]
    for _, overrides in lines:
        pasted = compose([*overrides.split(), "placement.pools.main.ranks=2", "batching.overlong=truncate"])
        assert pasted.batching.max_tokens is not None
    times = [float(row.split()[1]) for row in shown.splitlines() if re.match(r"\d  +[\d.]", row)]
    assert times == sorted(times)


def test_without_enough_memory_there_is_no_suggestion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(suggest_layouts, "_TRIES", 3)
    assert not main(config(2), 0.5, None, 10.0, print)
    assert "none fits" in capsys.readouterr().out
