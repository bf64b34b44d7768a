from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpack.config.errors import ConfigError
from rlpack.config.recipes import config_class
from rlpack.config.roles import forward_batching, pool_of, role_batching, shares_gpus, sleep_level, started_roles
from rlpack.config.schema import (
    Actor,
    Config,
    Critic,
    Parallel,
    Placement,
    Pool,
    Role,
    RoleBatching,
    Rollout,
    builtin_roles,
)
from rlpack.config.sections.role_batching import ForwardBatching
from rlpack.config.validate import validate
from rlpack.packing import make_plan
from rlpack.packing.batching import Batching

ACTOR = Batching(
    mode="dynamic", max_tokens=77, micro_batch_size=3, algorithm="first_fit_shuffle", pad_to_multiple=2,
    length_multiple=4,     min_microbatches=5, divisible_by=6, overlong="drop", balance="tokens",
)  # fmt: skip


# Values of keys that don't count anything.
CHOICES = {
    "mode": "packed",
    "algorithm": "concatenative",
    "overlong": "truncate",
    "balance": "none",
    "equal_rows": True,
}


def test_a_role_may_set_every_key_of_the_actors_batching():
    assert set(RoleBatching.model_fields) == {field.name for field in fields(Batching)}


@pytest.mark.parametrize("role", ["actor", "reference"])
def test_a_role_without_its_own_batching_inherits_all_of_the_actors(role):
    assert role_batching(Config(batching=ACTOR), role) == ACTOR


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_roles_that_make_no_microbatches_never_lose_a_row_to_the_token_budget(role):
    lengths = np.array([3 * ACTOR.max_tokens, 1, 1])
    plan = make_plan(lengths, role_batching(Config(batching=ACTOR), role), dp_size=2)
    assert plan.lengths.tolist() == lengths.tolist()
    assert (plan.step_of_row == 0).all()


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=60), ranks=st.integers(1, 5))
def test_engines_get_equally_many_prompts_however_long_they_are(lengths, ranks):
    config = Config(rollout=Rollout(max_num_seqs=4))
    plan = make_plan(np.array(lengths), role_batching(config, "rollout"), dp_size=ranks)
    counts = [len(plan.rank_plan(rank).rows) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


# Sharing prompts needs other values of further keys.
KEYS = [field.name for field in fields(Batching) if field.name != "share_prompts"]


@pytest.mark.parametrize("name", KEYS)
def test_a_role_overrides_one_key_and_inherits_the_others(name):
    value = CHOICES.get(name, 9)
    config = Config.model_validate({"reference": {"batching": {name: value}}}).model_copy(update={"batching": ACTOR})
    found = role_batching(config, "reference")
    assert getattr(found, name) == value
    assert found.override(**{name: getattr(ACTOR, name)}) == ACTOR


def test_passes_without_gradients_follow_the_updates_plan_unless_a_key_is_set():
    config = Config(batching=ACTOR, critic=Critic(forward_batching=ForwardBatching(micro_batch_size=9)))
    assert forward_batching(config, "actor") is None
    assert forward_batching(config, "critic") == ACTOR.override(micro_batch_size=9)
    assert forward_batching(config, "reference") is None


@pytest.mark.parametrize("name", [name for name in ForwardBatching.model_fields if name in KEYS])
def test_passes_without_gradients_override_one_key_and_inherit_the_roles_own(name):
    value = CHOICES.get(name, 9)
    critic = {"batching": {"length_multiple": 3}, "forward_batching": {name: value}}
    config = Config.model_validate({"critic": critic}).model_copy(update={"batching": ACTOR})
    of_role = role_batching(config, "critic")
    found = forward_batching(config, "critic")
    assert of_role.length_multiple == 3
    assert found == of_role.override(**{name: value}) != of_role


def test_roles_with_models_share_prompts_as_the_actor_does_and_others_have_whole_rows():
    reward_model = {"batching": {"share_prompts": False}}
    roles = builtin_roles() | {"judge": Role(target="a:B")}
    config = Config.model_validate({"reward_model": reward_model}).model_copy(
        update={"batching": Batching(share_prompts=True), "roles": roles}
    )
    shares = {role: role_batching(config, role).share_prompts for role in roles}
    assert [role for role, value in shares.items() if value] == ["actor", "critic", "reference"]


def test_a_passes_budget_is_shared_by_the_ranks_that_share_its_rows():
    actor = Actor(parallel=Parallel(cp=2), forward_batching=ForwardBatching(max_tokens=16384))
    found = forward_batching(Config(actor=actor), "actor")
    assert found is not None
    assert found.max_tokens == 2 * 16384


def test_a_trained_role_may_set_every_key_of_its_passes_but_those_that_its_update_fixes():
    assert set(ForwardBatching.model_fields) == set(RoleBatching.model_fields) - {"mode", "overlong"}


def test_a_users_role_takes_its_batching_from_its_own_section():
    roles = builtin_roles() | {"judge": Role(target="a:B", batching=RoleBatching(micro_batch_size=2))}
    assert role_batching(Config(roles=roles), "judge").micro_batch_size == 2


def test_an_unknown_role_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"no role 'umpire'; roles has: actor, critic, reference"):
        role_batching(Config(), "umpire")


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("actor", "roles.actor.batching is set; set batching instead"),
        ("reference", "roles.reference.batching is set; set reference.batching instead"),
        ("rollout", "the role rollout has no microbatches"),
    ],
)
def test_a_built_in_role_has_one_home_for_its_batching(role, message):
    roles = {"roles": {name: {"target": target.target} for name, target in builtin_roles().items()}}
    roles["roles"][role]["batching"] = {"micro_batch_size": 2}
    with pytest.raises(ConfigError, match=message):
        validate({"model": {"config": {"model_type": "qwen2"}}} | roles)


def test_what_a_role_inherits_has_to_go_with_what_it_sets():
    sections = {"batching": {"mode": "fixed", "max_tokens": None}, "reference": {"batching": {"mode": "packed"}}}
    sections["algorithm"] = {"kl_coef": 0.1}
    with pytest.raises(
        ConfigError, match=r"reference\.batching, with the values inherited from batching: .*token budget"
    ):
        validate({"model": {"config": {"model_type": "qwen2"}}} | sections)


def test_a_role_without_a_place_runs_in_the_first_pool():
    placement = Placement(pools={"first": Pool(), "second": Pool()}, roles={"actor": "second"})
    config = Config(placement=placement)
    assert (pool_of(config, "actor"), pool_of(config, "judge")) == ("second", "first")


def test_only_the_roles_that_a_run_needs_are_started():
    assert started_roles(Config()) == ["actor", "rollout", "reward"]
    with_kl = Config.model_validate({"algorithm": {"kl_coef": 0.1}})
    assert started_roles(with_kl) == ["actor", "reference", "rollout", "reward"]
    assert started_roles(config_class("rlpack.recipes.sft")()) == ["actor"]


def on_pools(gpus: float, roles: dict[str, str], **rollout) -> Config:
    """Return a config with a pool `main` and one named `own`, both with GPUs."""
    pool = Pool(ranks=1, gpus_per_rank=gpus)
    placement = Placement(pools={"main": pool, "own": pool}, roles=roles)
    return Config(rollout=Rollout(**({"engine": "vllm"} | rollout)), placement=placement)


@pytest.mark.parametrize(
    ("gpus", "roles", "rollout", "level"),
    [
        (1, {}, {}, 1),
        (1, {}, {"sleep_level": 0}, 0),
        (1, {}, {"sleep_level": 2}, 2),
        (1, {"rollout": "own"}, {}, 0),
        (1, {"rollout": "own", "reward": "own"}, {}, 0),
        (1, {"rollout": "own"}, {"sleep_level": 2}, 0),
        (0, {}, {}, 0),
        (1, {}, {"engine": "hf"}, 0),
    ],
)
def test_engines_sleep_by_default_where_roles_with_models_share_their_gpus(gpus, roles, rollout, level):
    config = on_pools(gpus, roles, **rollout)
    assert sleep_level(config) == level
    assert shares_gpus(config) == (gpus > 0 and not roles)


def test_a_role_of_ones_own_shares_the_gpus_of_its_pool():
    config = on_pools(1, {"rollout": "own", "judge": "own"})
    with_judge = config.model_copy(update={"roles": config.roles | {"judge": Role(target="judge:Judge")}})
    assert (sleep_level(config), sleep_level(with_judge)) == (0, 1)
