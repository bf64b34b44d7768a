import re

import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.layout_sizes import layout_sizes
from rlpack.config.roles import role_batching, role_parallel
from rlpack.config.schema import Config
from rlpack.config.validate import validate

VALID = {"model": {"config": {"model_type": "qwen2"}}}


def config_of(ranks: int = 4, **sections) -> Config:
    return validate(VALID | {"placement": {"pools": {"main": {"ranks": ranks}}}} | sections)


def problems(ranks: int = 4, **sections) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(ranks, **sections)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "pp": 1, "ep": 1}),
        ({"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 1}),
        ({"dp_replicate": 4}, {"dp_replicate": 4, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 1}),
        ({"cp": 2}, {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 1, "pp": 1, "ep": 1}),
        ({"cp": 4}, {"dp_replicate": 1, "dp_shard": 1, "cp": 4, "tp": 1, "pp": 1, "ep": 1}),
        ({"tp": 2}, {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 1, "ep": 1}),
        ({"cp": 2, "tp": 2, "sp": False}, {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 2, "pp": 1, "ep": 1}),
        ({"pp": 2}, {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 2, "ep": 1}),
        ({"ep": 4}, {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "pp": 1, "ep": 4}),
        ({"cp": 2, "tp": 2, "ep": 2}, {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 2, "pp": 1, "ep": 2}),
    ],
)
def test_shards_take_the_ranks_that_are_left(parallel, expected):
    assert layout_sizes(config_of(actor={"parallel": parallel}), "actor", 4) == expected


def test_roles_inherit_the_actors_layout_or_set_their_own():
    sections = {"actor": {"parallel": {"dp_replicate": 2}}, "critic": {"parallel": {"dp_replicate": 1}}}
    config = config_of(**sections)
    assert layout_sizes(config, "reference", 4) == {
        "dp_replicate": 2,
        "dp_shard": 2,
        "cp": 1,
        "tp": 1,
        "pp": 1,
        "ep": 1,
    }
    assert layout_sizes(config, "reward_model", 2) == {
        "dp_replicate": 2,
        "dp_shard": 1,
        "cp": 1,
        "tp": 1,
        "pp": 1,
        "ep": 1,
    }
    assert layout_sizes(config, "critic", 4) == {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    assert role_parallel(config, "critic").dp_shard == -1


def test_roles_without_a_model_have_data_ranks_only():
    config = config_of(actor={"parallel": {"dp_replicate": 2}})
    assert layout_sizes(config, "rollout", 4) == layout_sizes(config, "reward", 4) == {"dp_shard": 4}


@pytest.mark.parametrize(
    ("ranks", "parallel", "message"),
    [
        (
            4,
            {"dp_replicate": 3},
            "actor.parallel.dp_replicate (3) doesn't divide the 4 ranks of placement.pools.main, on which the actor "
            "runs; set actor.parallel.dp_replicate=2, or placement.pools.main.ranks=6",
        ),
        (
            2,
            {"dp_replicate": 8},
            "set actor.parallel.dp_replicate=2, or placement.pools.main.ranks=8",
        ),
        (
            4,
            {"dp_shard": 2},
            "actor.parallel.dp_shard is 2, so the actor needs 2 ranks, but placement.pools.main has 4; set "
            "actor.parallel.dp_shard=4, or actor.parallel.dp_shard=-1, or placement.pools.main.ranks=2",
        ),
        (4, {"dp_replicate": 2, "dp_shard": 4}, "set actor.parallel.dp_shard=2, or actor.parallel.dp_shard=-1"),
        (4, {"cp": 3}, "actor.parallel.cp (3) doesn't divide the 4 ranks"),
        (
            4,
            {"dp_replicate": 2, "cp": 4},
            "dp_replicate (2) × actor.parallel.cp (4) is 8, which doesn't divide",
        ),
        (4, {"dp_replicate": 2, "cp": 4}, "set actor.parallel.dp_replicate=1, or placement.pools.main.ranks=8"),
        (4, {"tp": 3}, "actor.parallel.tp (3) doesn't divide the 4 ranks"),
        (4, {"tp": 3}, "set actor.parallel.tp=2, or placement.pools.main.ranks=6"),
        (4, {"tp": 0}, "actor.parallel.tp is 0; it has to be at least 1"),
        (4, {"cp": 4, "tp": 2}, "actor.parallel.cp (4) × actor.parallel.tp (2) is 8, which doesn't divide"),
        (4, {"ep": 0}, "actor.parallel.ep is 0; it has to be at least 1"),
        (
            4,
            {"ep": 3},
            "actor.parallel.ep (3) doesn't divide the 4 ranks of dp_shard · cp, from which the actor takes the ranks "
            "that share experts; set actor.parallel.ep=2",
        ),
        (4, {"ep": 4, "tp": 2}, "actor.parallel.ep (4) doesn't divide the 2 ranks of dp_shard · cp"),
        (4, {"ep": 4, "dp_replicate": 2}, "set actor.parallel.ep=2"),
        (4, {"pp": 3}, "actor.parallel.pp (3) doesn't divide the 4 ranks"),
        (4, {"pp": 3}, "set actor.parallel.pp=2, or placement.pools.main.ranks=6"),
        (4, {"pp": 4, "tp": 2}, "actor.parallel.tp (2) × actor.parallel.pp (4) is 8, which doesn't divide"),
        (
            4,
            {"vpp": 2},
            "actor.parallel.vpp is 2, but the actor has no pipeline stages (actor.parallel.pp=1); set "
            "actor.parallel.vpp=1, or actor.parallel.pp=2",
        ),
        (4, {"pp": 2, "vpp": 0}, "actor.parallel.vpp is 0; it has to be at least 1"),
        (4, {"dp_shard": 0}, "actor.parallel.dp_shard is 0; set the number of ranks that share the weights, or -1"),
        (4, {"dp_shard": -2}, "actor.parallel.dp_shard is -2; it has to be at least -1"),
        (4, {"dp_replicate": 0}, "actor.parallel.dp_replicate is 0; it has to be at least 1"),
    ],
)
def test_sizes_that_do_not_give_the_ranks_are_refused_with_the_nearest_that_do(ranks, parallel, message):
    assert message in problems(ranks, actor={"parallel": parallel})


def test_a_role_in_a_smaller_pool_names_the_key_that_it_inherits_or_sets():
    placement = {
        "pools": {"main": {"ranks": 4}, "frozen": {"ranks": 1}},
        "roles": dict.fromkeys(("actor", "rollout", "reward"), "main") | {"reference": "frozen"},
    }
    sections = {"placement": placement, "algorithm": {"kl_coef": 0.1}, "actor": {"parallel": {"dp_replicate": 2}}}
    text = problems(**sections)
    assert "actor.parallel.dp_replicate (2) doesn't divide the 1 rank of placement.pools.frozen" in text
    assert "on which the reference runs; set reference.parallel.dp_replicate=1, or" in text
    config_of(**sections, reference={"parallel": {"dp_replicate": 1}})
    experts = sections | {"actor": {"parallel": {"ep": 4}}}
    assert "actor.parallel.ep (4) doesn't divide the 1 rank of dp_shard · cp, from which the reference" in problems(
        **experts
    )
    config_of(**experts, reference={"parallel": {"ep": 1}})
    assert "reference.parallel.dp_replicate (3) doesn't" in problems(
        **sections, reference={"parallel": {"dp_replicate": 3}}
    )


def test_ranks_that_share_tokens_share_the_token_budget():
    batching, rollout = {"max_tokens": 400}, {"data": {"max_prompt_tokens": 512}, "rollout": {"max_new_tokens": 256}}
    for parallel in ({}, {"cp": 1}):
        text = problems(batching=batching, actor={"parallel": parallel}, **rollout)
        assert "batching.max_tokens is 400 for the role actor, under the 768 slots" in text
        assert "raise it to 768 or more, share it among ranks by actor.parallel.cp=2, lower one of the two" in text
    config = config_of(batching=batching, actor={"parallel": {"cp": 2}}, **rollout)
    assert role_batching(config, "actor").max_tokens == role_batching(config, "critic").max_tokens == 800
    assert role_batching(config, "reward").max_tokens == 400
    text = problems(batching={"max_tokens": 200}, actor={"parallel": {"cp": 2}}, **rollout)
    assert "is 200 for the role actor on each of the 2 ranks that share a microbatch, under the 768 slots" in text
    assert "actor.parallel.cp=4" in text
    text = problems(batching={"max_tokens": 100}, **rollout)
    assert "share it among ranks by actor.parallel.cp=8 placement.pools.main.ranks=8" in text
    for gpus, cp in ((0, 6), (1, 8)):  # on GPUs, whole nodes of four
        placement = {"pools": {"main": {"ranks": 4, "gpus_per_rank": gpus}}}
        text = problems(batching={"max_tokens": 150}, placement=placement, **rollout)
        assert re.search(rf"actor\.parallel\.cp={cp} .*placement\.pools\.main\.ranks={cp}, lower", text)
    text = problems(batching={"max_tokens": 10}, **rollout)
    assert " or more, lower one of the two" in text  # more than 64 ranks would be needed


def test_sequences_are_padded_to_whole_chunks_only_where_ranks_hold_chunks():
    parallel = {"cp": 4, "cp_method": "all_gather"}
    config = config_of(
        batching={"pad_to_multiple": 3},
        actor={"parallel": parallel},
        reference={"parallel": {"cp_method": "ulysses"}},
        critic={"parallel": {"cp": 2}},
        reward_model={"parallel": {"cp": 1}},
    )
    multiples = {
        role: (batching.pad_to_multiple, batching.length_multiple)
        for role in ("actor", "reference", "critic", "reward_model", "rollout", "reward")
        for batching in [role_batching(config, role)]
    }
    none = (3, 1)
    assert multiples == {
        "actor": (24, 8),
        "critic": (12, 4),
        **dict.fromkeys(("reference", "reward_model", "rollout", "reward"), none),
    }


def test_the_proposed_number_of_ranks_holds_whole_chunks():
    # 762 tokens are at most 2 * 381, but take 764 slots in chunks of two ranks.
    rollout = {"data": {"max_prompt_tokens": 506}, "rollout": {"max_new_tokens": 256}, "batching": {"max_tokens": 381}}
    assert "actor.parallel.cp=2" in problems(**rollout)
    text = problems(actor={"parallel": {"cp_method": "all_gather"}}, **rollout)
    assert "actor.parallel.cp=4" in text
    config_of(actor={"parallel": {"cp": 4, "cp_method": "all_gather"}}, **rollout)


def test_only_started_roles_are_checked():
    config_of(critic={"parallel": {"dp_replicate": 3}})


def test_a_missing_pool_is_named_where_the_token_budget_is_too_small():
    for placement in ({"roles": {"actor": "typo"}}, {"pools": {}}):
        with pytest.raises(ConfigError) as caught:
            validate(VALID | {"placement": placement, "batching": {"max_tokens": 16}})
        assert any("placement" in problem for problem in caught.value.problems)


def test_a_layout_that_roles_inherit_is_refused_once():
    found = problems(ranks=2, actor={"parallel": {"tp": 3}}, algorithm={"kl_coef": 0.1})
    assert found.count("doesn't divide the 2 ranks") == 1


def test_experts_are_divided_among_the_ranks_of_a_stage():
    config_of(4, actor={"parallel": {"pp": 2, "ep": 2}})
    found = problems(4, actor={"parallel": {"pp": 2, "ep": 4}})
    assert "actor.parallel.ep (4) doesn't divide the 2 ranks of dp_shard · cp" in found
    assert found.endswith("set actor.parallel.ep=2")


def test_roles_inherit_virtual_stages_unless_they_have_no_stages():
    actor = {"parallel": {"pp": 2, "vpp": 3}}
    config = config_of(4, actor=actor, critic={"parallel": {"pp": 1}}, reference={"parallel": {"vpp": 2}})
    shares = {role: role_parallel(config, role) for role in ("actor", "critic", "reference", "reward_model")}
    sizes = {role: (parallel.pp, parallel.vpp) for role, parallel in shares.items()}
    assert sizes == {"actor": (2, 3), "critic": (1, 1), "reference": (2, 2), "reward_model": (2, 3)}
    found = problems(4, actor=actor, algorithm={"kl_coef": 0.1}, reference={"parallel": {"pp": 1, "vpp": 2}})
    assert "reference.parallel.vpp is 2, but the reference has no pipeline stages (reference.parallel.pp=1)" in found
