"""Sections of training: the optimizer, low-rank adapters and mixtures of experts."""

from typing import Literal

from pydantic import Field

from rlpack.config.sections.section import NonNegative, Positive, Section

# With rollout.lora=adapter: ranks for which vLLM (0.32, 0.33) can reserve memory; adapters of smaller ranks fit, too.
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


class Optimizer(Section):
    """AdamW (Loshchilov and Hutter, 2019): learning rate schedule, weight decay and frozen weights."""

    name: Literal["adamw", "adamw_8bit"] = Field(
        default="adamw", description="adamw_8bit keeps moments in 8 bits (torchao, the extra eight-bit)."
    )
    learning_rate: float = Field(default=1e-6, gt=0, le=100, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate decays over the recipe's steps."
    )
    warmup_steps: NonNegative = Field(
        default=0.0,
        description="Length of the linear warm-up: a number of steps or, if below 1, a fraction of the steps that "
        "train the role, rounded down. The step after it has the peak rate.",
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Final learning rate of the linear and cosine schedules, as a fraction of the peak; it would be "
        "reached one step after the last.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay rate of the second moment.")
    weight_decay: NonNegative = Field(
        default=0.0, description="Decoupled weight decay of matrices; vectors (biases, norms) are not decayed."
    )
    no_decay: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Patterns of further weights that are not decayed, such as *embed_tokens*.",
    )
    freeze: tuple[str, ...] = Field(
        default=(), strict=False, description="Patterns of weights to freeze, such as model.layers.[0-3].*."
    )
    max_grad_norm: Positive = Field(default=1.0, description="Global norm that gradients are clipped to.")

    def warmup_of(self, steps: int) -> int:
        """Return the steps of warm-up in a recipe of `steps` steps.

        >>> Optimizer(warmup_steps=10).warmup_of(50), Optimizer(warmup_steps=0.25).warmup_of(50)
        (10, 12)
        """
        return int(round(self.warmup_steps * steps, 6)) if self.warmup_steps < 1 else int(self.warmup_steps)


class Lora(Section):
    """Low-rank adapters instead of full fine-tuning (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = Field(default=0, ge=0, le=65_536, description="Rank of the adapters; 0 for full fine-tuning.")
    alpha: Positive = Field(default=32.0, description="Adapters are scaled by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of an adapter's inputs during updates.")
    targets: tuple[str, ...] = Field(
        default=("*",),
        strict=False,
        description="Patterns of the linear layers with adapters; the head never has one.",
    )


class Experts(Section):
    """How a mixture of experts is trained."""

    balance_coefficient: NonNegative = Field(
        default=0.0,
        description="Weight of the load-balancing loss of each layer with experts (DeepSeek-V3's, over sequences); "
        "0 for none.",
    )
    replay_routing: bool = Field(
        default=False,
        description="Whether the update routes each token to the experts that it had when the old log-probs were "
        "computed. A batch with a single optimizer step needs no replay.",
    )
