"""Single keys that lower a run's memory, and the same configuration with another value."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from rlpack.config.layout_sizes import layout_sizes
from rlpack.config.roles import gpus_per_rank, pool_of, role_compute, role_parallel, started_roles
from rlpack.config.schema import Config
from rlpack.recipes.dry_run.engine_memory import gpu_share

C = TypeVar("C")
# The key of the number of rows that generate at once.
ROWS_AT_ONCE = "rollout.max_num_seqs"
# Largest tp tried: the GPUs of a node, whose links are fast.
MAX_TP = 8
# Smaller budgets that are tried, each half of the one before.
_HALVINGS = 4


def with_value(section: C, key: str, value: Any) -> C:
    """Return a copy of a section in which a key has another value.

    >>> with_value(Config(), "actor.parallel.tp", 2).actor.parallel.tp
    2
    """
    name, _, rest = key.partition(".")
    if rest:
        value = with_value(getattr(section, name), rest, value)
    if isinstance(section, dict):
        return {**section, name: value}  # pyright: ignore[reportReturnType]
    if dataclasses.is_dataclass(section) and not isinstance(section, type):
        return dataclasses.replace(section, **{name: value})
    return section.model_copy(update={name: value})  # pyright: ignore[reportAttributeAccessIssue]


def smaller(config: Config, longest: int) -> Iterator[tuple[str, Any]]:
    """Yield keys and values that lower the memory of the actor or of generation, cheapest first, or raise vLLM's share.

    Args:
        config: the whole configuration.
        longest: tokens of the longest row, which the token budget has to hold.
    """
    on_gpu, compute = gpus_per_rank(config, "actor") > 0, role_compute(config, "actor")
    kinds = ("none", "selective", "full")
    for kind in kinds[kinds.index(compute.gradient_checkpointing) + 1 :]:
        yield "actor.gradient_checkpointing", kind
    budget = config.batching.max_tokens
    if budget is not None and config.batching.mode != "fixed":
        shared = role_parallel(config, "actor").cp
        for half in (budget // 2**power for power in range(1, _HALVINGS + 1)):
            if half * shared >= longest:
                yield "batching.max_tokens", half
    elif config.batching.micro_batch_size > 1:
        yield "batching.micro_batch_size", config.batching.micro_batch_size // 2
    if compute.precision == "fp32":
        yield "actor.precision", "bf16"
    offloads = ("none", "optimizer", "parameters")
    for offload in offloads[offloads.index(compute.offload) + 1 :] if on_gpu else ():
        yield "actor.offload", offload
    yield from _rows_at_once(config)
    yield from _layouts(config)
    if config.actor.optimizer.name == "adamw":
        yield "actor.optimizer.name", "adamw_8bit"
    if config.actor.lora.rank == 0:
        yield "actor.lora.rank", 16
    yield from _shares(config)


def _rows_at_once(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield smaller numbers of rows that generate at once, down to one; each needs a part of the KV cache."""
    rows = config.rollout.max_num_seqs if "rollout" in started_roles(config) else 1
    while rows > 1:
        rows //= 2
        yield ROWS_AT_ONCE, rows


def _layouts(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield layouts of the same ranks whose parts are smaller."""
    pool = pool_of(config, "actor")
    ranks = config.placement.pools[pool].ranks
    sizes, parallel = layout_sizes(config, "actor", ranks), role_parallel(config, "actor")
    if parallel.dp_replicate > 1:
        yield "actor.parallel.dp_replicate", 1
    for tp in (2 * sizes["tp"], 4 * sizes["tp"]):
        if tp <= MAX_TP and sizes["dp_shard"] % (tp // sizes["tp"]) == 0:
            yield "actor.parallel.tp", tp


def for_the_share(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield keys and values with which a vLLM whose share of a GPU is too small may start, cheapest first."""
    yield from _shares(config)
    if config.rollout.dtype is None and config.actor.precision == "fp32":
        yield "actor.precision", "bf16"


def _shares(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield larger shares of a GPU for a vLLM that takes a share."""
    if config.rollout.engine == "vllm" and gpus_per_rank(config, "rollout") and config.rollout.kv_cache_gb is None:
        tenths = (tenth / 10 for tenth in range(1, 10))
        yield from (("rollout.vllm.gpu_memory_utilization", share) for share in tenths if share > gpu_share(config))
