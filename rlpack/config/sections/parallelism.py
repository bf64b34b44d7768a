"""Sections of how a role's ranks divide rows and the model: the actor's, and those that other roles inherit."""

from typing import Annotated, Literal

from pydantic import Field

from rlpack.config.sections.section import Count, Section

# -1 stands for the ranks that the other sizes leave.
ShardCount = Annotated[int, Field(ge=-1)]
ContextMethod = Literal["ulysses", "all_gather"]


class Parallel(Section):
    """How a role's ranks divide rows and the model; their number is dp_replicate · dp_shard · cp · tp · pp."""

    dp_replicate: Count = Field(
        default=1,
        description="Replicas of the sharded model (HSDP). Weights are gathered within a replica; only gradients are "
        "summed over replicas.",
    )
    dp_shard: ShardCount = Field(
        default=-1,
        description="Data ranks of a replica; -1 for the rest. Weights, gradients and optimizer state are sharded over "
        "dp_shard · cp ranks.",
    )
    cp: Count = Field(
        default=1,
        description="Ranks that share the tokens of a microbatch (context parallelism), each holding at most "
        "batching.max_tokens of them.",
    )
    cp_method: ContextMethod = Field(
        default="ulysses",
        description="How attention works across ranks if cp is above 1. `ulysses`: an all-to-all gives each rank all "
        "tokens for some of the heads; the number of attention heads of a tp rank has to be divisible by cp. "
        "`all_gather`: each rank gathers all keys and values, for any number of heads. Each sequence is padded to a "
        "multiple of 2·cp tokens and split into 2·cp chunks; rank r holds chunks r and 2·cp−1−r (zigzag), so that all "
        "ranks do the same work.",
    )
    tp: Count = Field(
        default=1,
        description="Ranks that share the weights of each layer (tensor parallelism). The number of attention heads "
        "and of key and value heads has to be divisible by it, and hidden_size by dp_shard · cp.",
    )
    pp: Count = Field(
        default=1,
        description="Pipeline stages, each of which has some whole layers of the model; at most the number of layers. "
        "The number of microbatches of an optimizer step is made a multiple of it.",
    )
    vpp: Count = Field(
        default=1,
        description="With pp above 1, virtual stages of each pipeline rank: runs of layers that it computes in turn "
        "(interleaved 1F1B). This divides the idle time of the pipeline by vpp and multiplies the number of messages "
        "by vpp. The model has to have at least pp · vpp layers.",
    )
    sp: bool = Field(
        default=True,
        description="With tp above 1, whether each of its ranks keeps only its part of the tokens outside attention "
        "and MLP (sequence parallelism), which takes less memory.",
    )
    ep: Count = Field(
        default=1,
        description="Ranks that divide the experts of each layer and exchange tokens for them (expert parallelism), "
        "taken from the dp_shard · cp ranks of a replica, whose number has to be divisible by it. The number of "
        "experts has to be divisible by ep · tp.",
    )


class RoleParallel(Section):
    """A role's own layout; null inherits the actor's."""

    dp_replicate: Count | None = Field(default=None, description="As actor.parallel.dp_replicate; null inherits it.")
    dp_shard: ShardCount | None = Field(default=None, description="As actor.parallel.dp_shard; null inherits it.")
    cp: Count | None = Field(default=None, description="As actor.parallel.cp; null inherits it.")
    cp_method: ContextMethod | None = Field(default=None, description="As actor.parallel.cp_method; null inherits it.")
    tp: Count | None = Field(default=None, description="As actor.parallel.tp; null inherits it.")
    pp: Count | None = Field(default=None, description="As actor.parallel.pp; null inherits it.")
    vpp: Count | None = Field(
        default=None, description="As actor.parallel.vpp; null inherits it, or is 1 if the role has pp=1."
    )
    sp: bool | None = Field(default=None, description="As actor.parallel.sp; null inherits it.")
    ep: Count | None = Field(default=None, description="As actor.parallel.ep; null inherits it.")
