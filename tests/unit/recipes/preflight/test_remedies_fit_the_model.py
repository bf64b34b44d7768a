"""Remedies that a message about a layout names before any model is built are accepted by the model, too."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.validate import validate
from rlpack.models.loading import build_meta_model
from rlpack.recipes.preflight.split_checks import split_sizes_problem
from tests.unit.config.test_layout_remedies import applied, config_with, problems, remedies

DENSE = {"model_type": "qwen2", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = DENSE | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
WIDTHS = {"hidden_size": 96, "intermediate_size": 100}
MODELS = {"dense": DENSE | WIDTHS, "experts": EXPERTS | WIDTHS}
LONGEST = {"data": {"max_prompt_tokens": 64}, "rollout": {"max_new_tokens": 128}}


def assert_accepted(composed: dict[str, Any], overrides: list[str]) -> None:
    """Apply the overrides of one remedy, and build the model without weights."""
    changed = applied(composed, overrides)
    try:
        config = validate(changed)
    except ConfigError as error:
        raise AssertionError(f"{overrides} in {composed}: {error}") from error
    model = build_meta_model(config.model, vocab_size=96)
    problem = split_sizes_problem(config, "actor", model)
    assert problem is None, f"{overrides} in {composed}: {problem}"


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_sizes_that_do_not_fit_the_ranks(kind: str, ranks: int):
    found = 0
    for cp, tp, pp, ep in itertools.product((1, 3, 4), (1, 2, 3, 5), (1, 2, 5), (1, 3) if kind == "experts" else (1,)):
        parallel = {"cp": cp, "tp": tp, "pp": pp, "ep": ep}
        composed = config_with(ranks, parallel, model={"config": MODELS[kind]})
        for overrides in [way for problem in problems(composed) for way in remedies(problem)]:
            assert_accepted(composed, overrides)
            found += 1
    assert found > 20


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_sequence_over_the_budget_names_ranks_that_share_it(ranks: int):
    """Also where the pool has too few of them, or the heads don't divide."""
    for tokens, tp in itertools.product((20, 30, 60, 191), (1, 2) if ranks % 2 == 0 else (1,)):
        composed = config_with(ranks, {"tp": tp}, batching={"max_tokens": tokens}, **LONGEST)
        composed |= {"model": {"config": MODELS["dense"]}}
        [over] = problems(composed)
        assert "share it among ranks by actor.parallel.cp=" in over
        assert_accepted(composed, next(remedies(over)))


@pytest.mark.parametrize("nested", [False, True])
def test_sizes_are_read_from_a_folder(tmp_path: Path, nested: bool):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": DENSE} if nested else DENSE))
    [problem] = problems(config_with(2, {"tp": 3}, model={"path": str(tmp_path)}))
    assert problem.endswith("; set actor.parallel.tp=2")  # 3 ranks don't divide 4 heads


@pytest.mark.parametrize("text", ["", "[]", "{", '{"num_attention_heads": "many", "num_hidden_layers": 0}'])
def test_a_damaged_configuration_limits_no_advice(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    [problem] = problems(config_with(2, {"tp": 3}, model={"path": str(tmp_path)}))
    assert problem.endswith("; set actor.parallel.tp=2, or placement.pools.main.ranks=3")
