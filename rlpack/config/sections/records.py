"""The sections of what a run records: metrics, samples and checkpoints."""

from typing import Literal

from pydantic import Field

from rlpack.config.sections.section import Count, Section


class Logger(Section):
    """Where metrics are logged; metrics.jsonl and report.html are always written."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard event files into the run directory.")
    wandb: Literal["disabled", "offline", "online"] = Field(default="disabled", description="Weights & Biases.")
    wandb_project: str = Field(default="rlpack", description="Project of the Weights & Biases run.")
    samples: int = Field(default=2, ge=0, description="Rollouts printed after each evaluation.")


class Checkpoint(Section):
    """Resumable state."""

    every: Count = Field(default=20, description="Steps between checkpoints, warm-up included; the last is saved, too.")
    keep: Count = Field(default=2, description="How many of the newest checkpoints to keep.")
    asynchronous: bool = Field(
        default=False,
        description="Write checkpoints while training continues. Steps then wait only until each rank has copied its "
        "part of weights and optimizer state, which takes that much memory.",
    )
