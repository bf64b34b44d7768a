"""Batching keys that nothing reads: a warning names each, and only those."""

from typing import Any, get_args

import pytest

from rlpack.config.validate import validate
from rlpack.config.warnings import config_warnings
from rlpack.packing.batching import Mode

# Of the 256 rows of a batch.
STEPS = {"mini_batch_size": 64}
VALID = {"model": {"config": {"model_type": "qwen2"}}}
READERS = {
    "algorithm": {"packed"},
    "pad_to_multiple": {"packed"},
    "length_multiple": {"dynamic", "fixed"},
    "micro_batch_size": {"fixed"},
}
VALUES: dict[str, Any] = {"algorithm": "optimal", "pad_to_multiple": 8, "length_multiple": 8, "micro_batch_size": 4}


def warnings(**sections: Any) -> list[str]:
    return config_warnings(validate(VALID | sections))


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("name", READERS)
def test_a_key_of_another_mode_is_named_once_where_it_is_set(mode: str, name: str):
    unused = mode not in READERS[name]
    ways = {
        f"batching.{name}": {"batching": {"mode": mode, name: VALUES[name]}},
        f"actor.forward_batching.{name}": {
            "batching": {"mode": mode},
            "actor": {"forward_batching": {name: VALUES[name]}},
            "trainer": STEPS,
        },
        f"critic.batching.{name}": {
            "recipe": {"target": "rlpack.recipes.ppo"},
            "critic": {"batching": {"mode": mode, name: VALUES[name]}},
        },
    }
    for key, sections in ways.items():
        found = warnings(**sections)
        assert [text for text in found if text.startswith(f"{key} is {VALUES[name]} but unused")] == found
        assert len(found) == unused


def test_a_key_that_another_role_reads_is_used():
    critic = {"recipe": {"target": "rlpack.recipes.ppo"}, "critic": {"batching": {"mode": "fixed"}}}
    assert warnings(batching={"micro_batch_size": 4}, **critic) == []


def test_without_a_pass_for_old_log_probs_its_budget_is_unused():
    actor = {"forward_batching": {"max_tokens": 16384}}
    assert warnings(actor=actor, trainer=STEPS) == []
    (found,) = warnings(actor=actor, trainer=STEPS, algorithm={"correction": {"bypass": True}})
    assert found.startswith("actor.forward_batching.max_tokens is set but unused: algorithm.correction.bypass=true")


@pytest.mark.parametrize(
    ("sections", "is_used"),
    [
        ({}, False),
        ({"trainer": {"mini_batch_size": 256}}, False),
        ({"trainer": STEPS}, True),
        ({"trainer": {"updates_per_batch": 2}}, True),
        ({"algorithm": {"kl_coef": 0.1}}, False),
        ({"algorithm": {"kl_coef": 0.1, "kl_placement": "reward"}}, True),
        ({"algorithm": {"kl_coef": 0.1, "advantage": "mine:advantage"}}, True),
        ({"algorithm": {"kl_coef": 0.1}, "recipe": {"target": "rlpack.recipes.dapo"}}, True),
        ({"algorithm": {"correction": {"reject": {"token_k3": 1.0}}}}, True),
        ({"actor": {"lora": {"rank": 2, "dropout": 0.1}}}, True),
    ],
)
def test_a_single_optimizer_step_has_no_pass_for_old_log_probs_unless_something_reads_them(
    sections: dict[str, Any], is_used: bool
):
    actor = sections.get("actor", {}) | {"forward_batching": {"max_tokens": 16384}}
    found = [text for text in warnings(**sections | {"actor": actor}) if "forward_batching" in text]
    assert len(found) == (not is_used)
    assert all("max_tokens is set but unused: a batch is one optimizer step" in text for text in found)


def test_a_key_that_is_unused_for_two_reasons_is_named_once():
    actor = {"forward_batching": {"pad_to_multiple": 8}}
    assert len(warnings(actor=actor, batching={"mode": "dynamic"}, algorithm={"correction": {"bypass": True}})) == 1


def test_supervised_recipes_use_the_budget_for_the_held_out_loss_whatever_the_correction():
    found = warnings(
        recipe={"target": "rlpack.recipes.sft"},
        data={"completion_column": "solution"},
        actor={"forward_batching": {"max_tokens": 16384}},
        algorithm={"correction": {"bypass": True}},
    )
    assert not any("forward_batching" in text for text in found)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_the_bound_of_k3_is_unused_by_other_estimators(estimator: str):
    found = warnings(
        algorithm={"kl_coef": 0.1, "kl_estimator": estimator, "k3_bound": 5.0, "kl_straight_through": True}
    )
    assert [text.partition(" but ")[0] for text in found] == ["algorithm.k3_bound is 5"] * (estimator != "k3")
