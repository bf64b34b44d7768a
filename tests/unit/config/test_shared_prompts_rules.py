"""Errors of roles that can't share prompts: they name the keys that are set, and every remedy works."""

import re

import pytest

from tests.unit.config.problems import problems

SHARED = "batching.share_prompts=true"
PPO = "recipe=ppo"
KL = "algorithm.kl_coef=0.1"
CP = "actor.parallel.cp=2"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            [SHARED, "batching.mode=dynamic"],
            "batching.share_prompts=true needs batching.mode=packed, and it is dynamic",
        ),
        (
            [SHARED, PPO, "critic.batching.mode=dynamic"],
            "batching.share_prompts=true needs critic.batching.mode=packed, and it is dynamic",
        ),
        (
            [SHARED, KL, "reference.batching.pad_to_multiple=8"],
            "batching.share_prompts=true needs reference.batching.pad_to_multiple=1, and it is 8",
        ),
        (
            [SHARED, "actor.forward_batching.pad_to_multiple=8"],
            "batching.share_prompts=true needs actor.forward_batching.pad_to_multiple=1, and it is 8",
        ),
        (
            ["actor.forward_batching.share_prompts=true", "batching.mode=dynamic"],
            "actor.forward_batching.share_prompts=true needs batching.mode=packed, and it is dynamic",
        ),
        (
            [PPO, "critic.batching.share_prompts=true", "critic.forward_batching.pad_to_multiple=2"],
            "critic.batching.share_prompts=true needs critic.forward_batching.pad_to_multiple=1, and it is 2",
        ),
        (
            ["roles.j.target=a.b:C", "roles.j.batching.share_prompts=true", "batching.mode=dynamic"],
            "roles.j.batching.share_prompts=true needs batching.mode=packed, and it is dynamic",
        ),
        (
            [SHARED, "algorithm.kl_coef=0", CP, "actor.parallel.cp_method=all_gather"],
            "batching.share_prompts=true, but actor.parallel.cp_method=all_gather cuts each sequence into 4 chunks",
        ),
        (
            [SHARED, KL, CP, "reference.parallel.cp_method=all_gather"],
            "batching.share_prompts=true, but reference.parallel.cp_method=all_gather cuts each sequence into 4 chunks",
        ),
    ],
)
def test_the_keys_that_are_set_are_named_and_each_remedy_is_enough(overrides: list[str], named: str):
    (problem,) = problems(*overrides)
    assert named in problem
    remedies = re.findall(r"[\w.]+=\w+", problem.rpartition("; set ")[2])
    assert len(remedies) == 2
    for remedy in remedies:
        assert remedy not in overrides
        assert problems(*overrides, remedy) == []


@pytest.mark.parametrize("section", ["critic", "reference", "reward_model"])
def test_roles_that_are_not_started_may_have_any_batching(section: str):
    overrides = [SHARED, f"{section}.batching.mode=dynamic", "algorithm.kl_coef=0"]
    assert problems(*overrides) == []
    starts = {"critic": PPO, "reference": KL, "reward_model": "reward_model.path=org/model"}
    (problem,) = problems(*overrides, starts[section])
    assert f"{section}.batching.mode=packed, and it is dynamic" in problem
