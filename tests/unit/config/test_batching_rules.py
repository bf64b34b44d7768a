"""Rules about the batching of passes without gradients."""

from typing import Any

import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.validate import validate

VALID = {"model": {"config": {"model_type": "qwen2"}}}
PPO = {"recipe": {"target": "rlpack.recipes.ppo"}}


def problems(**sections: Any) -> str:
    try:
        validate(VALID | sections)
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


def forward(role: str, **values: Any) -> dict[str, Any]:
    return {role: {"forward_batching": values}}


@pytest.mark.parametrize(("max_tokens", "fits"), [(767, False), (768, True), (16384, True)])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_budget_of_its_own_holds_the_longest_rollout(role: str, max_tokens: int, fits: bool):
    found = problems(**PPO, **forward(role, max_tokens=max_tokens))
    if fits:
        assert found == ""
    else:
        expected = f"{role}.forward_batching.max_tokens is 767 for the role {role}, under the 768 slots"
        assert found.startswith(expected)
        assert "or set batching.overlong=truncate" in found


def test_an_alignment_of_its_own_counts_against_the_inherited_budget():
    batching = {"max_tokens": 768}
    assert problems(batching=batching) == ""
    found = problems(batching=batching, **forward("actor", pad_to_multiple=500))
    assert found.startswith("batching.max_tokens is 768 for the role actor, under the 1000 slots")


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_where_the_budget_cuts_rows_a_pass_has_to_cut_the_same(overlong: str):
    batching = {"max_tokens": 100, "overlong": overlong}
    found = problems(batching=batching, **forward("actor", max_tokens=400))
    assert found.startswith("actor.forward_batching cuts overlong sequences at other lengths than batching, with")
    assert "leave actor.forward_batching.max_tokens, " in found
    assert problems(batching=batching, **forward("actor", algorithm="concatenative")) == ""
    assert problems(batching=batching | {"overlong": "own_microbatch"}, **forward("actor", max_tokens=400)) == ""


@pytest.mark.parametrize("key", ["mode", "overlong"])
def test_the_mode_and_overlong_rows_are_the_roles(key: str):
    found = problems(**forward("actor", **{key: "fixed"}))
    assert found.startswith(f"actor.forward_batching.{key} is not a key; did you mean batching.{key}?")


@pytest.mark.parametrize(("key", "value"), [("max_tokens", 0), ("pad_to_multiple", -1), ("divisible_by", "two")])
def test_each_key_has_the_limits_of_the_inherited_one(key: str, value: Any):
    assert problems(**forward("critic", **{key: value})).startswith(f"critic.forward_batching.{key} is {value!r}")


def test_a_value_that_conflicts_with_an_inherited_one_names_both_sections():
    found = problems(**PPO, **forward("critic", divisible_by=2**30))
    assert "critic.forward_batching, with the values inherited from critic.batching: " in found
