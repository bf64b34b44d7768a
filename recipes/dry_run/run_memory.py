"""The memory of a run: of each role on a rank, of the roles of a pool together, and whether it fits.

Roles of a pool share their ranks' processes and work one at a time. A rank holds what all of its roles keep between
their calls, plus the peak of one call.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlpack.batch.fields import FIELDS
from rlpack.config.roles import gpus_per_rank, is_builtin, pool_of, pools_in_use, role_compute, started_roles
from rlpack.config.schema import Config
from rlpack.config.sections.compute import Offload
from rlpack.distributed.errors import in_units
from rlpack.models.memory_simulation import ModelMemory
from rlpack.recipes.dry_run.engine_memory import IN_FLIGHT, EngineMemory

# Memory of a rank's process before it has a model: Python with PyTorch, transformers, Ray and rlpack.
PROCESS_BYTES = 400_000_000
# Memory of a GPU that PyTorch's allocator doesn't count: the CUDA context, and buffers of NCCL and cuBLAS.
CONTEXT_BYTES = 1_000_000_000
# Columns of a batch, which are in the object store.
_COLUMNS = ("input_ids", "response_mask")
_SAMPLED = ("rollout_logprobs", "policy_version", "logprobs")
_OF_ROLES = {"reference": ("reference_logprobs",), "critic": ("values", "advantages", "returns")}


@dataclass(frozen=True)
class RoleMemory:
    """The bytes of a role on a rank.

    Attributes:
        model: memory of its model.
        offload: what GPUs offload to host memory; `none` on CPUs.
        start: additional bytes while its model is built; next to a GPU, first in host memory.
        copied: bytes of the copy from which an asynchronous checkpoint is written, in host memory.
    """

    model: ModelMemory
    offload: Offload = "none"
    start: int = 0
    copied: int = 0

    @property
    def host(self) -> int:
        """Return the bytes that are in host memory next to a GPU."""
        memory = self.model
        return {"none": 0, "optimizer": memory.optimizer, "parameters": memory.kept}[self.offload]

    @property
    def host_at_start(self) -> int:
        """Return the bytes that are in host memory next to a GPU before the first step, once its model is built."""
        return self.model.weights if self.offload == "parameters" else 0

    @property
    def kept(self) -> int:
        """Return the bytes on the device between two calls."""
        return self.model.kept - self.host

    @property
    def peak(self) -> int:
        """Return the peak number of bytes on the device during a call."""
        memory = self.model
        if self.offload == "parameters":
            return memory.transient
        return max(sum(memory.at_peak.values()) - self.host, memory.step - self.host, self.kept)


@dataclass(frozen=True)
class PoolMemory:
    """The bytes of a rank of a pool.

    Attributes:
        name: name of the pool.
        ranks: number of ranks.
        gpus_per_rank: GPUs of a rank, 0 on CPUs; with several, sizes are those of each.
        limit: memory of the rank's GPU, or of the machine for all ranks on CPUs; None if it isn't known.
        roles: memory of its roles with models.
        engine: memory of the role rollout's engine, if it is in this pool.
    """

    name: str
    ranks: int
    gpus_per_rank: float
    limit: int | None
    roles: Mapping[str, RoleMemory]
    engine: EngineMemory | None

    @property
    def on_gpu(self) -> bool:
        """Return whether each rank has a GPU."""
        return self.gpus_per_rank > 0

    @property
    def kept(self) -> int:
        """Return the bytes on the device that live between all calls."""
        roles = sum(role.kept + (0 if self.on_gpu else role.copied) for role in self.roles.values())
        return roles + (0 if self.engine is None else self.engine.kept)

    @property
    def peak(self) -> int:
        """Return the peak number of bytes on the device."""
        calls = [
            0,
            *(role.peak - role.kept for role in self.roles.values()),
            *(role.start for role in self.roles.values()),
        ]
        if self.engine is not None:
            calls.append(self.engine.call)
        return self.kept + max(calls) + (CONTEXT_BYTES if self.on_gpu else PROCESS_BYTES)

    @property
    def is_short(self) -> bool:
        """Return whether a GPU is too small, or vLLM's share of it."""
        over = self.on_gpu and self.limit is not None and self.peak > self.limit
        return over or (self.engine is not None and self.engine.missing > 0)

    @property
    def whole(self) -> int:
        """Return the bytes of the largest model that a rank next to a GPU has whole in host memory at one time."""
        starts = [role.start for role in self.roles.values()] + ([self.engine.start] if self.engine is not None else [])
        return max(starts, default=0) if self.on_gpu else 0

    @property
    def host(self) -> int:
        """Return the bytes of host memory of a rank; for a rank on a CPU, all of its bytes."""
        return self.host_after_start + self.starting

    @property
    def host_after_start(self) -> int:
        """Return the bytes of host memory of a rank once all roles are built."""
        if not self.on_gpu:
            return self.peak
        asleep = self.engine.host if self.engine is not None else 0
        return PROCESS_BYTES + asleep + sum(role.host + role.copied for role in self.roles.values())

    @property
    def starting(self) -> int:
        """Return the additional bytes of host memory of a rank next to a GPU while roles are built.

        Roles are built one after another, before the first step: there are no moments and no copies of weights yet.
        """
        if not self.on_gpu:
            return 0
        asleep = self.engine.host if self.engine is not None else 0
        built = asleep + sum(role.host_at_start for role in self.roles.values())
        starts = [role.start + built - role.host_at_start for role in self.roles.values()]
        if self.engine is not None:
            starts.append(self.engine.start + built - asleep)
        return max(0, PROCESS_BYTES + max(starts, default=0) - self.host_after_start)


@dataclass(frozen=True)
class RunMemory:
    """The memory of a run.

    Attributes:
        pools: pools in use.
        store: bytes of batches and weights in the object stores of all nodes.
        host_limit: memory of the machine that all ranks run on; None if they don't run on this one.
        uncounted: roles of users, whose memory isn't known.
    """

    pools: tuple[PoolMemory, ...]
    store: int
    host_limit: int | None
    uncounted: tuple[str, ...] = ()

    @property
    def host(self) -> int:
        """Return the host memory of all ranks and of the object store.

        Pools build their roles one after another.
        """
        starting = max((pool.ranks * pool.starting for pool in self.pools), default=0)
        return self.store + sum(pool.ranks * pool.host_after_start for pool in self.pools) + starting

    @property
    def excess(self) -> int:
        """Return the largest excess of a memory over its limit, in bytes; 0 or less if everything fits."""
        over = [pool.peak - pool.limit for pool in self.pools if pool.on_gpu and pool.limit is not None]
        over += [pool.engine.missing for pool in self.pools if pool.engine is not None]
        over += [self.host - self.host_limit] if self.host_limit is not None else []
        return max(over, default=0)

    @property
    def lacks_share_only(self) -> bool:
        """Return whether vLLM's share of a GPU is too small, and nothing else is."""
        shares = {pool.engine.problem(pool.name) for pool in self.pools if pool.engine is not None}
        return self.excess > 0 and shares.issuperset(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield what doesn't fit."""
        for pool in self.pools:
            if pool.on_gpu and pool.limit is not None and pool.peak > pool.limit:
                yield f"pool {pool.name} needs {in_units(pool.peak)} of each GPU, which has {in_units(pool.limit)}"
            if pool.engine is not None and (problem := pool.engine.problem(pool.name)) is not None:
                yield problem
        if self.host_limit is not None and self.host > self.host_limit:
            yield (
                f"all ranks together need {in_units(self.host)} of host memory, but the machine has "
                f"{in_units(self.host_limit)}{self._start_note()}"
            )

    def _start_note(self) -> str:
        """Return a note on whole models, if host memory is highest while roles are built."""
        pool = max(self.pools, key=lambda each: each.ranks * each.starting)
        if not pool.starting:
            return ""
        return f"; as a role of pool {pool.name} starts, each rank holds a whole model of up to {in_units(pool.whole)}"


def run_memory(
    config: Config,
    roles: Mapping[str, RoleMemory],
    engine: EngineMemory | None,
    tokens: int,
    routing: int = 0,
    *,
    device_limit: int | None,
    host_limit: int | None,
) -> RunMemory:
    """Return the memory of a run.

    Args:
        config: the whole configuration.
        roles: memory of the roles with models.
        engine: memory of the role rollout's engine; None without it.
        tokens: number of tokens of a batch.
        routing: bytes of a token's recorded experts.
        device_limit: memory of a GPU.
        host_limit: memory of the machine, None if ranks run on others.
    """
    pools = []
    for name, pool in pools_in_use(config).items():
        own = {role: memory for role, memory in roles.items() if pool_of(config, role) == name}
        generates = engine if engine is not None and pool_of(config, "rollout") == name else None
        limit = device_limit if pool.gpus_per_rank else host_limit
        pools.append(PoolMemory(name, pool.ranks, pool.gpus_per_rank, limit, own, generates))
    others = tuple(role for role in started_roles(config) if not is_builtin(role))
    return RunMemory(tuple(pools), store_bytes(config, tokens, engine, routing), host_limit, others)


def store_bytes(config: Config, tokens: int, engine: EngineMemory | None, routing: int = 0) -> int:
    """Return the bytes of the tokens of all batches in the object store, and of weights for the engines.

    With `trainer.lead`, there are up to two batches with drain; with in_flight, one for each step of the lead and of
    the window of late groups.

    The weights are the buckets in flight or, with `trainer.lead`, `rollout.publish=drain` and `rollout.lora=merged`,
    all weights that were published last (`rlpack.recipes.driver.engine_restarts.keep_weights`).
    """
    names = _COLUMNS + (_SAMPLED if engine is not None else ())
    for role in started_roles(config):
        names += _OF_ROLES.get(role, ())
    trainer = config.trainer
    if trainer.lead:
        tokens *= 2 if config.rollout.publish == "drain" else trainer.lead + trainer.late_groups.window
    width = sum(dtype.itemsize for name in names if (dtype := FIELDS[name].dtype) is not None)
    if engine is None:
        return tokens * (width + routing)
    keeps = config.trainer.lead > 0 and config.rollout.publish == "drain" and config.rollout.lora == "merged"
    whole = engine.weights * max(1, int(gpus_per_rank(config, "rollout")) if config.rollout.engine == "vllm" else 1)
    return tokens * (width + routing) + (whole if keeps else min(engine.weights, IN_FLIGHT * engine.bucket))


def role_offload(config: Config, role: str) -> Offload:
    """Return what a role's GPUs keep in host memory."""
    return role_compute(config, role).offload if gpus_per_rank(config, role) else "none"
