"""The sections that say how weights are trained."""

from typing import Literal

from pydantic import Field

from rlpack.config.sections.section import NonNegative, Positive, Section


class Optimizer(Section):
    """AdamW (Loshchilov and Hutter, 2019): its rate over the steps, what it decays and what it leaves alone."""

    name: Literal["adamw", "adamw_8bit"] = Field(
        default="adamw", description="adamw_8bit keeps moments in 8 bits (torchao; install rlpack[eight-bit])."
    )
    learning_rate: Positive = Field(default=1e-6, description="Learning rate, the highest of the schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the rate falls, from step to step of the recipe, towards its floor."
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Steps of the recipe over which the rate rises; the one after has all of it.",
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the rate that linear and cosine fall to, after the last step.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the mean of gradients.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the mean of squared gradients.")
    weight_decay: NonNegative = Field(
        default=0.0, description="Decoupled weight decay of matrices; vectors (biases, norms) have none."
    )
    no_decay: tuple[str, ...] = Field(
        default=(), strict=False, description="Patterns of further weights without decay, such as *embed_tokens*."
    )
    freeze: tuple[str, ...] = Field(
        default=(), strict=False, description="Patterns of weights that are not trained, such as model.layers.[0-3].*."
    )
    max_grad_norm: Positive = Field(default=1.0, description="Gradients are scaled down to this global norm.")


class Lora(Section):
    """Low-rank adapters in the place of full fine-tuning (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = Field(default=0, ge=0, description="Rank of the adapters; 0 trains the weights themselves.")
    alpha: Positive = Field(default=32.0, description="An adapter's product is scaled by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of an adapter's inputs dropped in updates.")
    targets: tuple[str, ...] = Field(
        default=("*",),
        strict=False,
        description="Patterns of the linear layers that get one; the head never does.",
    )
