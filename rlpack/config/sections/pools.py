"""Pools of devices."""

from pydantic import Field

from rlpack.config.sections.section import Count, NonNegative, Section


class Pool(Section):
    """Devices that roles share; a rank is one process."""

    ranks: Count = Field(default=2, description="Processes of the pool.")
    # Ray counts CPUs and GPUs in units of 0.0001.
    cpus_per_rank: float = Field(
        default=1.0, ge=1e-4, le=1e6, description="CPU cores that a rank claims, and its compute threads."
    )
    gpus_per_rank: NonNegative = Field(
        default=0.0,
        description="GPUs that a rank claims: 0 or 1; in a pool with no role but rollout, with rollout.engine=vllm, "
        "any number, over which vLLM splits the model (tensor parallelism).",
    )
