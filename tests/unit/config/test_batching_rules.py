"""Rules about the batching of passes without gradients."""

from typing import Any

import pytest

from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError
from rlpack.config.roles import role_batching
from rlpack.config.validate import validate
from rlpack.packing import make_plan

VALID = {"model": {"config": {"model_type": "qwen2"}}}
PPO = {"recipe": {"target": "rlpack.recipes.ppo"}}


def problems(**sections: Any) -> str:
    try:
        validate(VALID | sections)
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


def test_a_step_has_no_more_rows_than_the_driver_can_plan():
    assert problems(trainer={"prompts_per_step": 1 << 10, "group_size": 1 << 10}) == ""
    message = problems(trainer={"prompts_per_step": 32, "group_size": 2147483647})
    assert "(32) · trainer.group_size (2147483647) is 68,719,476,704 rows, but a step has at most 1,048,576" in message


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
        assert found.endswith("or set batching.overlong=own_microbatch")


@pytest.mark.parametrize(
    ("overrides", "remedies"),
    [
        (["batching.max_tokens=64"], {"batching.overlong=truncate"}),
        (["reference.batching.max_tokens=64"], {"batching.overlong=own_microbatch"}),
        (["actor.forward_batching.max_tokens=64"], {"batching.overlong=own_microbatch"}),
        (["batching.max_tokens=64", "reference.batching.max_tokens=4000"], {"batching.overlong=own_microbatch"}),
        (["batching.max_tokens=64", "reference.batching.mode=dynamic"], {"batching.overlong=own_microbatch"}),
        (
            ["batching.max_tokens=64", "reference.batching.overlong=error"],
            {"batching.overlong=own_microbatch", "reference.batching.overlong=own_microbatch"},
        ),
        (["roles.j.target=a.b:C", "roles.j.batching.max_tokens=64"], {"batching.overlong=truncate"}),
        (
            ["roles.j.target=a.b:C", "roles.j.batching.max_tokens=64", "roles.j.batching.overlong=error"],
            {"roles.j.batching.overlong=truncate"},
        ),
    ],
)
def test_overlong_sequences_are_allowed_as_the_error_says(overrides: list[str], remedies: set[str]):
    overrides = [*overrides, "algorithm.kl_coef=0.1"]
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert {problem.rpartition("or set ")[2] for problem in caught.value.problems} == remedies
    compose([*overrides, *remedies])


def test_an_alignment_of_its_own_counts_against_the_inherited_budget():
    batching = {"max_tokens": 768}
    assert problems(batching=batching) == ""
    found = problems(batching=batching, **forward("actor", pad_to_multiple=500))
    assert found.startswith("batching.max_tokens is 768 for the role actor, under the 1000 slots")


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_where_the_budget_cuts_rows_a_pass_has_to_cut_the_same(overlong: str):
    batching = {"max_tokens": 100, "overlong": overlong}
    found = problems(batching=batching, **forward("actor", max_tokens=400))
    assert found.startswith("actor.forward_batching cuts overlong sequences at different lengths from batching, with")
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


@pytest.mark.parametrize(
    ("batching", "sections", "message", "smallest"),
    [
        (
            {"max_tokens": 16, "pad_to_multiple": 64},
            {},
            "batching.max_tokens is 16 for the role actor, under the slots of any sequence: batching.pad_to_multiple "
            "is 64; set batching.max_tokens=64 or more, or lower the multiple",
            64,
        ),
        ({"max_tokens": 16, "mode": "dynamic", "length_multiple": 17}, {}, "batching.length_multiple is 17", 17),
        (
            {"max_tokens": 5, "pad_to_multiple": 3},
            {"actor": {"parallel": {"cp": 4, "cp_method": "all_gather"}}},
            "batching.max_tokens is 5 for the role actor on each of the 4 ranks of actor.parallel.cp, under the slots "
            "of any sequence: batching.pad_to_multiple is 3, and cp_method=all_gather cuts each sequence into 8 "
            "chunks; set batching.max_tokens=6 or more",
            6,
        ),
        ({"max_tokens": 31, "pad_to_multiple": 64}, {"actor": {"parallel": {"cp": 2}}}, "max_tokens=32 or more", 32),
        (
            {"max_tokens": 16},
            {"actor": {"forward_batching": {"pad_to_multiple": 32}}},
            "actor.forward_batching.pad_to_multiple is 32",
            32,
        ),
        (
            {"max_tokens": 16, "pad_to_multiple": 32},
            {"algorithm": {"kl_coef": 0.1}, "reference": {"batching": {"pad_to_multiple": 40}}},
            "batching.max_tokens is 16 for the role actor",  # the reference inherits it, and needs more
            40,
        ),
    ],
)
def test_a_budget_below_the_alignment_is_refused_with_the_smallest_that_works(batching, sections, message, smallest):
    placement = {"pools": {"main": {"ranks": 4}}}
    cut = {"overlong": "own_microbatch"}
    text = problems(batching=batching | cut, placement=placement, **sections)
    assert message in text
    assert f"set batching.max_tokens={smallest} or more" in text
    for value, fits in ((smallest, True), (smallest - 1, False)):
        assert (
            problems(batching=batching | cut | {"max_tokens": value}, placement=placement, **sections) == ""
        ) is fits


@pytest.mark.parametrize("overlong", ["truncate", "drop", "own_microbatch"])
@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_overlong_sequences_do_not_excuse_a_budget_below_the_alignment(recipe: str, overlong: str):
    sections = {"recipe": {"target": f"rlpack.recipes.{recipe}"}, "data": {"completion_column": "answer"}}
    batching = {"max_tokens": 16, "pad_to_multiple": 64, "overlong": overlong}
    assert "set batching.max_tokens=64 or more" in problems(batching=batching, **sections)
    assert problems(batching=batching | {"max_tokens": 64}, **sections) == ""


def test_the_smallest_budget_holds_the_longest_rollout_where_overlong_ones_are_errors():
    batching = {"max_tokens": 16, "pad_to_multiple": 500}
    assert "set batching.max_tokens=1000 or more" in problems(batching=batching)
    assert problems(batching=batching | {"max_tokens": 1000}) == ""


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_a_multiple_of_the_other_mode_stops_no_role_without_a_budget(role: str):
    """Prompts and rewards are planned in a mode of their own, and no value of the actor's may refuse them."""
    batching = {"max_tokens": 100, "overlong": "truncate", "length_multiple": 128}
    config = validate(VALID | {"batching": batching})
    assert make_plan([3, 90, 300], role_batching(config, role), dp_size=2).order.size == 3
    dynamic = {"mode": "dynamic", "max_tokens": 100, "overlong": "truncate", "pad_to_multiple": 128}
    config = validate(VALID | {"batching": dynamic})
    assert make_plan([3, 90, 300], role_batching(config, role), dp_size=2).order.size == 3
