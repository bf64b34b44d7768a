"""The sections that say how weights are trained."""

from typing import Literal

from pydantic import Field

from rlpack.config.section import NonNegative, Positive, Section


class Optimizer(Section):
    """AdamW (Loshchilov and Hutter, 2019)."""

    learning_rate: Positive = Field(default=1e-6, description="Learning rate of the first step.")
    schedule: Literal["constant", "linear"] = Field(
        default="constant", description="linear falls from step to step and would reach 0 after the last."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the mean of gradients.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the mean of squared gradients.")
    weight_decay: NonNegative = Field(default=0.0, description="Decoupled weight decay.")
    max_grad_norm: Positive = Field(default=1.0, description="Gradients are scaled down to this global norm.")
