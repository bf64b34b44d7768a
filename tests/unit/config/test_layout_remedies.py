"""Each remedy that a message about layouts or budgets names is applied alone, and the configuration checked again."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.validate import validate

VALID = {"model": {"config": {"model_type": "qwen2"}}}
OVERRIDE = r"[a-z_]+(?:\.[a-z_]+)+=[a-z0-9_-]+"


def config_with(ranks: int, parallel: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    pools = {"main": {"ranks": ranks}}
    return VALID | {"placement": {"pools": pools}, "actor": {"parallel": dict(parallel)}} | sections


def problems(composed: dict[str, Any]) -> list[str]:
    try:
        validate(composed)
    except ConfigError as error:
        return error.problems
    return []


def remedies(problem: str) -> Iterator[list[str]]:
    """Yield the overrides of each remedy; those of one remedy are separated by single spaces."""
    ways = re.split(r"; set |; raise it to \d+ or more, share it among ranks by ", problem, maxsplit=1)[1]
    for found in re.finditer(rf"{OVERRIDE}(?: {OVERRIDE})*", ways):
        yield found.group().split()


def applied(composed: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    for override in overrides:
        path, _, value = override.partition("=")
        composed = with_value(composed, path.split("."), int(value) if re.fullmatch(r"-?\d+", value) else value)
    return composed


def with_value(section: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**section, name: with_value(section.get(name, {}), rest, value) if rest else value}


def check_remedies(composed: dict[str, Any]) -> int:
    """Apply each remedy of the problems; return their number."""
    count = 0
    for problem in problems(composed):
        named = list(remedies(problem))
        assert named, problem
        for overrides in named:
            left = problems(applied(composed, overrides))
            assert left == [], f"{problem}\n{' '.join(overrides)} in {composed}\n{left}"
        count += len(named)
    return count


def layouts(**values: tuple[int, ...]) -> Iterator[dict[str, int]]:
    for sizes in itertools.product(*values.values()):
        yield dict(zip(values, sizes, strict=True))


@pytest.mark.parametrize("ranks", [1, 3, 4, 6])
def test_every_remedy_for_sizes_is_accepted(ranks: int):
    found = 0
    for parallel in layouts(dp_replicate=(1, 2), dp_shard=(-1, 1, 2), cp=(1, 3), tp=(1, 3, 4), pp=(1, 2)):
        found += check_remedies(config_with(ranks, parallel))
    for parallel in layouts(dp_shard=(-1, 2), tp=(1, 2), pp=(1, 2), vpp=(1, 2), ep=(1, 3)):
        found += check_remedies(config_with(ranks, parallel))
    assert found > 50


@pytest.mark.parametrize("dp_shard", [-1, 1, 2, 4])
@pytest.mark.parametrize("method", ["ulysses", "all_gather"])
def test_every_remedy_for_a_token_budget_is_accepted(dp_shard: int, method: str):
    lengths = {"data": {"max_prompt_tokens": 506}, "rollout": {"max_new_tokens": 256}}
    for cp, tokens, multiple in itertools.product((1, 2, 4), (100, 191, 192, 300, 381), (1, 3)):
        parallel = {"dp_shard": dp_shard, "cp": cp, "cp_method": method}
        batching = {"max_tokens": tokens, "pad_to_multiple": multiple}
        composed = config_with(4, parallel, batching=batching, **lengths)
        for problem in problems(composed):
            if "share it among ranks" in problem:
                way = next(remedies(problem))
                assert problems(applied(composed, way)) == [], f"{way} in {composed}"
            elif "under the" not in problem:  # the layout; the budget may be too small whatever it is
                left = [each for way in remedies(problem) for each in problems(applied(composed, way))]
                assert all("under the" in each for each in left), f"{problem} in {composed}: {left}"


def test_a_budget_is_shared_among_ranks_where_dp_shard_leaves_some():
    lengths = {"data": {"max_prompt_tokens": 512}, "rollout": {"max_new_tokens": 256}, "batching": {"max_tokens": 400}}
    [problem] = problems(config_with(4, {"dp_shard": 4}, **lengths))
    assert "share it among ranks by actor.parallel.cp=2 actor.parallel.dp_shard=-1, lower" in problem


def test_fewer_ranks_per_row_that_would_not_hold_it_are_not_proposed():
    lengths = {"data": {"max_prompt_tokens": 512}, "rollout": {"max_new_tokens": 256}, "batching": {"max_tokens": 300}}
    [problem] = problems(config_with(4, {"cp": 3}, **lengths))
    assert problem.endswith("set actor.parallel.cp=4, or placement.pools.main.ranks=6")


def test_ranks_are_proposed_where_other_roles_of_the_pool_run_on_them():
    composed = config_with(4, {"tp": 3}, reference={"parallel": {"tp": 4}}, algorithm={"kl_coef": 0.1})
    [problem] = problems(composed)
    assert problem.endswith("set actor.parallel.tp=2")  # the reference doesn't fit 6 ranks
    check_remedies(composed)


def test_an_inherited_layout_is_changed_only_where_the_roles_that_inherit_it_can_follow():
    pools = {"main": {"ranks": 4}, "frozen": {"ranks": 3}}
    placement = {"pools": pools, "roles": dict.fromkeys(("actor", "rollout", "reward"), "main")}
    placement["roles"] |= {"reference": "frozen"}
    composed = config_with(4, {"tp": 3}, algorithm={"kl_coef": 0.1}) | {"placement": placement}
    assert problems(composed)
    check_remedies(composed)
