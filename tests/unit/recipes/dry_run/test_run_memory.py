"""The memory of a run: what counts at the same time, on devices and in host memory, against sums made by hand."""

from typing import Any

import pytest

from rlpack.config.schema import Algorithm, Config, Data, Model, Placement, Pool, Rollout, Trainer
from rlpack.packing import Batching
from rlpack.recipes.dry_run.estimate_run import open_estimator
from rlpack.recipes.dry_run.memory_report import memory_lines
from rlpack.recipes.dry_run.run_memory import PoolMemory
from tests.builders import MODEL, tiny_config

# Two layers of 128, with the head size of 32 that vLLM's kernels for CPUs take.
WIDE = MODEL | {"hidden_size": 128}
GB = 10**9
# Assumed for the CUDA context, and for a process without a model.
CONTEXT, PROCESS = GB, 400_000_000


def config(pools: dict[str, Pool], roles: dict[str, str] | None = None, **sections: Any) -> Config:
    data = Data(generator={"train_size": 32, "validation_size": 4}, max_prompt_tokens=64)
    sizes: dict[str, Any] = {"model": Model(config=WIDE), "data": data, "batching": Batching(max_tokens=256)}
    sizes |= {"trainer": Trainer(prompts_per_step=4, group_size=4), "algorithm": Algorithm(kl_coef=0.0)}
    placement = Placement(pools=pools, roles=roles or {}, address="auto")
    return tiny_config("grpo", placement=placement, **(sizes | sections))


def vllm(**options: Any) -> Rollout:
    return Rollout.model_validate({"engine": "vllm", "max_new_tokens": 32, "kv_cache_gb": 1.0} | options)


def pools_of(given: Config) -> dict[str, PoolMemory]:
    return {pool.name: pool for pool in open_estimator(given, 80).memory(given).pools}


def weights_of(given: Config) -> int:
    """Return the bytes of the policy in fp32."""
    return 4 * sum(weight.numel() for weight in open_estimator(given, 80).model.parameters())


@pytest.mark.parametrize(("gpus", "outside"), [(1.0, CONTEXT), (0.0, PROCESS)])
def test_the_cache_of_a_vllm_that_never_sleeps_counts_while_the_actor_trains(gpus: float, outside: int):
    given = config({"main": Pool(ranks=2, gpus_per_rank=gpus)}, rollout=vllm(sleep_level=0 if gpus else None))
    (pool,) = pools_of(given).values()
    actor, weights = pool.roles["actor"], weights_of(given)
    assert actor.peak > actor.kept > 0
    assert pool.kept == actor.kept + weights + GB
    assert pool.peak == actor.peak + weights + GB + outside
    (line,) = [line for line in memory_lines(open_estimator(given, 80).memory(given)) if line.startswith("engine: ")]
    assert line.endswith(" of weights, 1 GB more for its KV cache, kept while other roles work")


def test_the_cache_of_a_vllm_that_sleeps_counts_only_while_it_generates():
    given = config({"main": Pool(ranks=2, gpus_per_rank=1.0)}, rollout=vllm())
    (pool,) = pools_of(given).values()
    actor, weights = pool.roles["actor"], weights_of(given)
    assert actor.peak - actor.kept < weights + GB
    assert pool.kept == actor.kept
    assert pool.peak == actor.kept + weights + GB + CONTEXT


def test_the_cache_of_transformers_counts_only_while_it_generates():
    given = config({"main": Pool(ranks=2, gpus_per_rank=1.0)}, rollout=Rollout(max_new_tokens=32))
    (pool,) = pools_of(given).values()
    actor, weights = pool.roles["actor"], weights_of(given)
    # Keys and values of 2 layers, 8 rows of 64 + 32 tokens, 2 heads of 32 numbers, with room for half as many again.
    cache = 3 * (2 * 2 * (8 * 96) * (2 * 32) * 4) // 2
    assert pool.kept == actor.kept + weights
    assert pool.peak == pool.kept + max(cache, actor.peak - actor.kept, actor.start) + CONTEXT


@pytest.mark.parametrize("gpus", [1.0, 2.0])
def test_a_pool_that_only_generates_has_weights_and_cache(gpus: float):
    pools = {"main": Pool(ranks=1, gpus_per_rank=1.0), "engines": Pool(ranks=2, gpus_per_rank=gpus)}
    given = config(pools, {"rollout": "engines"}, rollout=vllm())
    engines = pools_of(given)["engines"]
    assert engines.peak == weights_of(given) // gpus + GB // gpus + CONTEXT
