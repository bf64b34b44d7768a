"""Sections of how roles run their models: the actor's, and those that other roles inherit or override."""

from typing import Literal

from pydantic import Field

from rlpack.config.sections.section import Count, Section

Precision = Literal["fp32", "bf16"]


class Compute(Section):
    """How a role runs its model."""

    precision: Precision = Field(default="fp32", description="Compute dtype; weights and gradient sums stay fp32.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass.")
    reshard_after_forward: bool = Field(default=True, description="Free gathered weights after forward (FSDP2).")
    logprob_chunk: Count = Field(default=1024, description="Most tokens whose logits exist at one time.")
    isolation_check: bool = Field(
        default=True,
        description="At start, check that the model scores each row as transformers does for that row alone, that rows "
        "do not see each other, and that gradients of rows together are the sum of those of each row.",
    )


class RoleCompute(Section):
    """A role's own settings of its forward pass; null inherits the actor's."""

    precision: Precision | None = Field(default=None, description="As actor.precision; null inherits it.")
    reshard_after_forward: bool | None = Field(
        default=None, description="As actor.reshard_after_forward; null inherits it."
    )
    isolation_check: bool | None = Field(default=None, description="As actor.isolation_check; null inherits it.")
