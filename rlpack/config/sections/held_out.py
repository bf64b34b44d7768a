"""Sections of evaluations during a run."""

from typing import Any

from pydantic import Field

from rlpack.config.sections.section import Count, Section


class EvaluationSet(Section):
    """Further held-out prompts with a name: evaluation/<name>/* are their metrics."""

    source: str | None = Field(default=None, description="As data.source; null for that of the held-out prompts.")
    subset: str | None = Field(
        default=None, description="As data.subset, for this set; null for that of the same dataset."
    )
    split: str | None = Field(default=None, description="Its split; null for data.validation_split.")
    limit: Count | None = Field(
        default=None, description="Maximum number of prompts, drawn with the seed; null for all."
    )
    at_end: bool = Field(default=False, description="Evaluate once, after the last step: a test set.")
    reward_function: str | None = Field(
        default=None, description="As reward.function, for these prompts; null for the run's reward."
    )
    reward_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of reward_function."
    )


class Evaluation(Section):
    """Mean reward on the held-out split, or with recipe=sft the loss of its demonstrations."""

    every: Count = Field(
        default=10, description="Steps between evaluations; there is one before the first step and one after the last."
    )
    samples: Count = Field(
        default=4, description="Samples of each prompt at rollout.temperature, in addition to a greedy one."
    )
    sets: dict[str, EvaluationSet] = Field(
        default_factory=dict, description="Further held-out prompts by name, each with its own source and reward."
    )
