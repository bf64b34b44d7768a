"""What `trainer.lead` needs: a recipe that takes its batches early, and engines that nothing else waits for."""

import pytest

from rlpack.config.ahead_rules import ahead_problems
from rlpack.config.schema import Placement, Pool, Trainer
from tests.builders import tiny_config

APART = {"pools": {"main": Pool(), "engines": Pool()}}


def problems(recipe: str = "grpo", *, lead: int = 1, **roles: str) -> list[str]:
    placement = Placement(**APART, roles=roles)
    return list(ahead_problems(tiny_config(recipe, trainer=Trainer(lead=lead), placement=placement)))


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo", "remax"])
def test_engines_in_a_pool_of_their_own_may_run_ahead_and_score_there(recipe: str):
    assert problems(recipe, rollout="engines") == []
    assert problems(recipe, rollout="engines", reward="engines") == []


def test_without_a_lead_any_placement_is_fine():
    assert problems(lead=0) == []


def test_two_steps_ahead_are_refused_with_the_reason():
    (problem,) = problems(lead=2, rollout="engines")
    assert problem.startswith("trainer.lead is 2; it can be at most 1, because engines load new weights only when")


@pytest.mark.parametrize(
    ("recipe", "roles", "sharing"),
    [
        ("grpo", {}, "also runs actor;"),
        ("grpo", {"rollout": "engines", "actor": "engines"}, "also runs actor;"),
        ("ppo", {"rollout": "engines", "critic": "engines"}, "also runs critic;"),
    ],
)
def test_a_shared_pool_is_refused_with_a_placement_that_can_overlap(recipe: str, roles: dict[str, str], sharing: str):
    (problem,) = problems(recipe, **roles)
    assert sharing in problem
    assert "would take turns, and nothing would overlap" in problem
    assert "placement=two_pools" in problem


def test_a_recipe_that_generates_nothing_is_refused():
    (problem,) = problems("sft", actor="main")
    assert problem == "trainer.lead is 1, but recipe=sft generates nothing; set trainer.lead=0"
