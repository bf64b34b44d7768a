"""Sections of how a role's ranks divide rows and the model: the actor's, and those that other roles inherit."""

from typing import Annotated

from pydantic import Field

from rlpack.config.sections.section import Count, Section

# -1 stands for the ranks that the other sizes leave.
ShardCount = Annotated[int, Field(ge=-1)]


class Parallel(Section):
    """How the ranks of the role's pool divide rows and the model; the product of all sizes is the number of ranks."""

    dp_replicate: Count = Field(
        default=1,
        description="Replicas of the sharded model (HSDP). Weights are gathered within a replica; only gradients are "
        "summed over replicas.",
    )
    dp_shard: ShardCount = Field(
        default=-1, description="Ranks that weights, gradients and optimizer state are sharded over; -1 for the rest."
    )
    cp: Count = Field(
        default=1,
        description="Ranks that share the tokens of a microbatch (context parallelism, Ulysses), each holding at most "
        "batching.max_tokens of them. It divides the model's attention heads.",
    )


class RoleParallel(Section):
    """A role's own layout; null inherits the actor's."""

    dp_replicate: Count | None = Field(default=None, description="As actor.parallel.dp_replicate; null inherits it.")
    dp_shard: ShardCount | None = Field(default=None, description="As actor.parallel.dp_shard; null inherits it.")
    cp: Count | None = Field(default=None, description="As actor.parallel.cp; null inherits it.")
