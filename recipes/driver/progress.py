"""Progress: how far a run has come. With the seed it determines all later random numbers."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["sft_warmup", "train"]


@dataclass(frozen=True)
class Progress:
    """How far a run has come; replaced once per step, when the step is committed.

    Attributes:
        phase: `sft_warmup`, or `train` for the recipe's own steps.
        step: number of completed steps of the phase.
        optimizer_steps: number of completed optimizer steps of the actor, over all phases.
        prompts_consumed: position in the stream of prompts, including those that dynamic sampling discarded; the next
            step draws from here.
        prompts_trained: prompts that completed steps were trained on.
        demonstrations_trained: demonstrations used up by completed supervised steps, over all phases.
        kl_coef: the adapted KL coefficient; None before the first step that adapts it.
    """

    phase: Phase = "sft_warmup"
    step: int = 0
    optimizer_steps: int = 0
    prompts_consumed: int = 0
    prompts_trained: int = 0
    demonstrations_trained: int = 0
    kl_coef: float | None = None

    @property
    def recipe_started(self) -> bool:
        """Return whether a step of the recipe itself is completed."""
        return self.phase == "train" and self.step > 0
