"""What `trainer.lead` needs: a recipe that takes its batches early, and engines that nothing else waits for."""

import re
from typing import Any

import pytest

from rlpack.config.ahead_rules import ahead_problems, ahead_warnings
from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import RecipeSpec
from rlpack.config.schema import Config, Placement, Pool, Role, Rollout, Trainer
from rlpack.config.sections.value_models import RewardModel
from rlpack.config.warnings import config_warnings
from tests.builders import tiny_config

APART = {"pools": {"main": Pool(), "engines": Pool()}}


def problems(
    recipe: str = "grpo",
    *,
    lead: int = 1,
    generation: Rollout | None = None,
    late: dict[str, Any] | None = None,
    **roles: str,
) -> list[str]:
    placement = Placement(**APART, roles=roles)
    sections = {
        "trainer": Trainer(lead=lead, **(late or {})),
        "placement": placement,
        "rollout": generation or Rollout(),
    }
    return list(ahead_problems(tiny_config(recipe, **sections)))


def in_flight(**settings: Any) -> Rollout:
    return Rollout(**({"engine": "vllm", "publish": "in_flight"} | settings))


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo", "remax"])
def test_engines_in_a_pool_of_their_own_may_run_ahead_and_score_there(recipe: str):
    assert problems(recipe, rollout="engines") == []
    assert problems(recipe, rollout="engines", reward="engines") == []


def test_without_a_lead_any_placement_is_fine():
    assert problems(lead=0) == []


def test_two_steps_ahead_are_refused_with_the_reason():
    (problem,) = problems(lead=2, rollout="engines")
    assert "with rollout.publish=drain it can be at most 1, because engines load new weights only when" in problem
    assert "rollout.publish=in_flight with rollout.engine=vllm" in problem


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "remax"])
def test_weights_in_flight_allow_any_lead(recipe: str):
    assert problems(recipe, lead=4, generation=in_flight(), rollout="engines") == []


def test_a_recipe_that_draws_until_a_batch_is_full_runs_one_step_ahead():
    assert problems("dapo", lead=1, generation=in_flight(), rollout="engines") == []
    (problem,) = problems("dapo", lead=2, generation=in_flight(), rollout="engines")
    assert problem.startswith("trainer.lead is 2, but with recipe=dapo the first prompt of a batch")


@pytest.mark.parametrize(
    ("lead", "settings", "said"),
    [
        (0, {}, "trainer.lead is 0, so nothing is generated while weights are published"),
        (1, {"engine": "hf"}, "rollout.engine=hf can't change weights within a response; set rollout.engine=vllm"),
        (1, {"deterministic": True}, "set rollout.deterministic=false, or rollout.publish=drain"),
        (1, {"kv_cache": "keep", "lora": "adapter"}, "set rollout.kv_cache=clear, or rollout.lora=merged"),
        (1, {"kv_cache": "keep", "vllm": {"enable_prefix_caching": False}}, "or remove enable_prefix_caching"),
    ],
)
def test_weights_in_flight_are_refused_where_they_have_no_effect_or_no_engine(
    lead: int, settings: dict[str, Any], said: str
):
    (problem,) = problems(lead=lead, generation=in_flight(**settings), rollout="engines")
    assert said in problem


def test_a_cache_is_kept_only_where_responses_go_on_with_new_weights():
    assert problems(generation=in_flight(kv_cache="keep"), rollout="engines") == []
    (problem,) = problems(generation=Rollout(kv_cache="keep"), rollout="engines")
    assert problem.endswith("set rollout.kv_cache=clear, or rollout.publish=in_flight")


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


@pytest.mark.parametrize(
    ("preset", "layout", "ranks"),
    [
        ("one_gpu", "actor.parallel.tp=1", (1, 1)),
        ("eight_gpus", "actor.parallel.tp=1", (4, 4)),
        ("eight_gpus", "actor.parallel.cp=8", (8, 1)),
    ],
)
def test_the_placement_that_can_overlap_keeps_the_gpus(preset: str, layout: str, ranks: tuple[int, int]):
    given = [f"placement={preset}", "actor.precision=bf16", "trainer.lead=1", layout]
    with pytest.raises(ConfigError) as caught:
        compose(given)
    (problem,) = caught.value.problems
    assert (", on more GPUs" in problem) == (sum(ranks) > {"one_gpu": 1, "eight_gpus": 8}[preset])
    keys = re.findall(r"placement\.[\w.]+=\w+", problem)
    config = compose([*given, *keys])
    pools = config.placement.pools
    assert (pools["main"].ranks, pools[config.placement.roles["rollout"]].ranks) == ranks
    assert {pool.gpus_per_rank for pool in pools.values()} == {1.0}
    assert not list(config_warnings(config))


def test_a_recipe_that_generates_nothing_is_refused():
    (problem,) = problems("sft", actor="main")
    assert problem == "trainer.lead is 1, but recipe=sft generates nothing; set trainer.lead=0"


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_window_for_late_groups_needs_weights_in_flight(recipe: str):
    late = {"late_groups": {"window": 2}}
    assert problems(recipe, lead=2, generation=in_flight(), late=late, rollout="engines") == []
    (problem,) = problems(recipe, lead=1, late=late, rollout="engines")
    assert problem.startswith(
        "trainer.late_groups.window is 2, but with rollout.publish=drain new weights wait for all"
    )
    (problem,) = problems(recipe, lead=0, late=late)
    assert problem.startswith("trainer.late_groups.window is 2, but trainer.lead is 0, so nothing is generated")
    assert "set trainer.late_groups.window=1, or trainer.lead=1 or more and rollout.publish=in_flight" in problem


@pytest.mark.parametrize("recipe", ["dapo", "remax"])
def test_recipes_that_need_whole_batches_refuse_a_window(recipe: str):
    (problem,) = problems(recipe, generation=in_flight(), late={"late_groups": {"window": 2}}, rollout="engines")
    assert problem.startswith(
        f"trainer.late_groups.window is 2, but recipe={recipe} needs all groups of a batch at once"
    )


def test_a_window_needs_a_recipe_whose_batches_have_known_places(monkeypatch: pytest.MonkeyPatch):
    spec = RecipeSpec(runs_ahead=True, takes_late_groups=True)
    monkeypatch.setattr("rlpack.config.ahead_rules.recipe_of", lambda config: spec)
    (problem,) = problems(generation=in_flight(), late={"late_groups": {"window": 2}}, rollout="engines")
    assert problem.startswith("trainer.late_groups.window is 2, but with recipe=grpo the first prompt of a batch")


def test_a_window_in_which_no_group_may_be_late_is_refused():
    late = {"late_groups": {"window": 2, "share": 0.2}, "prompts_per_step": 4}
    (problem,) = problems(generation=in_flight(), late=late, rollout="engines")
    assert (
        "trainer.late_groups.share of 0.2 of the 4 groups of trainer.prompts_per_step is less than one group" in problem
    )
    assert (
        problems(generation=in_flight(), late=late | {"late_groups": {"window": 2, "share": 0.25}}, rollout="engines")
        == []
    )


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ({"rollout": "engines", "reward": "engines"}, []),
        ({"rollout": "engines"}, ["trainer.lead is 1, but the role reward scores in the pool 'main', which also runs"]),
        ({"rollout": "engines", "reward": "spare"}, []),
    ],
)
def test_reward_functions_that_wait_for_updates_are_a_warning(roles: dict[str, str], expected: list[str]):
    found = list(ahead_warnings(scoring(roles)))
    assert [text.startswith(start) for text, start in zip(found, expected, strict=True)] == [True] * len(expected)
    assert all(text.endswith("set placement.roles.reward=engines") for text in found)
    assert list(ahead_warnings(scoring(roles, lead=0))) == []


def test_a_reward_model_and_a_judge_in_the_pool_that_trains_are_a_warning_with_the_pool_to_add():
    roles = {"judge": Role(target="rlpack.workers.judge:JudgeWorker"), **Config().roles}
    model = RewardModel(path="org/model")
    apart = {"rollout": "engines", "reward": "engines"}
    config = scoring(apart, roles=roles, reward_model=model)
    texts = [text for text in config_warnings(config) if "which also runs actor" in text]
    found = {text.partition("the role ")[2].partition(" ")[0]: text for text in texts}
    assert found.keys() == {"judge", "reward_model"}
    for role, text in found.items():
        assert "in the pool 'main', which also runs actor: scores of the next batch wait for every update" in text
        assert text.endswith(f"placement.pools.{role}.ranks=1 placement.roles.{role}={role}")
    moved = scoring(apart | {"judge": "spare", "reward_model": "spare"}, roles=roles, reward_model=model)
    assert list(ahead_warnings(moved)) == []


APART_FROM_TRAINING = ("placement=two_pools", "trainer.lead=1")
ON_GPUS = ("placement.pools.main.gpus_per_rank=1", "rollout=vllm", "placement.pools.engines.gpus_per_rank=2")
MODEL = "reward_model.path=org/model"
JUDGE = ("roles.judge.target=rlpack.workers.judge:JudgeWorker", "judge.url=http://a/v1", "judge.model=m")


@pytest.mark.parametrize(
    ("overrides", "pool", "expected"),
    [
        (["placement.roles.reward=main"], "engines", Pool(ranks=1)),
        # Engines with several GPUs per rank share their pool with no role.
        ([*ON_GPUS, "placement.roles.reward=main"], "reward", Pool(ranks=1)),
        ([*ON_GPUS, "placement.roles.reward=main", MODEL], "reward_model", Pool(ranks=1, gpus_per_rank=1)),
        ([*ON_GPUS, "placement.roles.reward=main", *JUDGE], "judge", Pool(ranks=1)),
        ([MODEL], "reward_model", Pool(ranks=1)),
        (["placement.pools.main.ranks=4", "actor.parallel.tp=2", MODEL], "reward_model", Pool(ranks=2)),
        (
            ["placement.pools.main.ranks=4", "actor.parallel.tp=2", "reward_model.parallel.tp=1", MODEL],
            "reward_model",
            Pool(ranks=1),
        ),
        (["placement.pools.main.ranks=4", "actor.parallel.dp_shard=4", MODEL], "reward_model", Pool(ranks=4)),
        (
            [MODEL, "placement.pools.reward_model.ranks=3", "placement.roles.reward=reward_model"],
            "reward_model_scores",
            Pool(ranks=1),
        ),
        (
            [*ON_GPUS, "roles.mine.target=a:B", "placement.roles.reward=main"],
            "mine",
            Pool(ranks=1, gpus_per_rank=1),
        ),
    ],
)
def test_the_proposed_pools_are_allowed_and_leave_nothing_that_waits(overrides: list[str], pool: str, expected: Pool):
    command = [*APART_FROM_TRAINING, *overrides]
    for _ in range(3):  # one role after the other
        if not (warnings := list(ahead_warnings(compose(command)))):
            break
        remedy = re.search(r"(?:set|its own pool:) (placement\.\S+=.*)$", warnings[0])
        assert remedy is not None
        command += remedy[1].split(" ")
    config = compose(command)
    assert list(ahead_warnings(config)) == []
    assert config.placement.pools[pool] == expected


def scoring(pools: dict[str, str], lead: int = 1, **sections: Any) -> Config:
    placement = Placement(pools={**APART["pools"], "spare": Pool()}, roles=pools)
    return tiny_config(trainer=Trainer(lead=lead), placement=placement, **sections)
