"""Sections of how roles run their models: the actor's, and those that other roles inherit or override."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlpack.config.sections.section import Count, Section

Precision = Literal["fp32", "bf16"]


def _from_boolean(value: Any) -> Any:
    """Return the choice that `true` or `false` stands for; they were once the only values."""
    return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


Offload = Literal["none", "optimizer", "parameters"]
Checkpointing = Annotated[Literal["none", "full", "selective"], BeforeValidator(_from_boolean)]


class Compute(Section):
    """How a role runs its model."""

    precision: Precision = Field(default="fp32", description="Compute dtype; weights and gradient sums stay fp32.")
    gradient_checkpointing: Checkpointing = Field(
        default="none",
        description="Activations that the backward pass recomputes: none; all but each layer's input (full, or true); "
        "or all but the outputs of matrix products, attention and exchanges between ranks (selective).",
    )
    compile: bool = Field(
        default=False,
        description="Compile the decoder layers with torch.compile, which fuses operations on GPUs; packed rows only. "
        "The first steps can take minutes longer.",
    )
    reshard_after_forward: bool = Field(default=True, description="Free gathered weights after forward (FSDP2).")
    offload: Offload = Field(
        default="none",
        description="What GPUs keep in host memory: AdamW's moments, except during the optimizer step (optimizer); or "
        "weights, gradients and moments, with the optimizer step on the CPU (parameters). No effect on CPUs.",
    )
    logprob_chunk: Count = Field(default=1024, description="Maximum number of tokens whose logits exist at once.")
    isolation_check: bool = Field(
        default=True,
        description="At startup, check the packed model: each row's log-probs match those of transformers on that row "
        "alone, no row attends to another, and the gradient of several rows is the sum of their own gradients.",
    )


class RoleCompute(Section):
    """A role's own settings of its forward pass; null inherits the actor's."""

    precision: Precision | None = Field(default=None, description="As actor.precision; null inherits it.")
    compile: bool | None = Field(default=None, description="As actor.compile; null inherits it.")
    reshard_after_forward: bool | None = Field(
        default=None, description="As actor.reshard_after_forward; null inherits it."
    )
    offload: Offload | None = Field(default=None, description="As actor.offload; null inherits it.")
    isolation_check: bool | None = Field(default=None, description="As actor.isolation_check; null inherits it.")
