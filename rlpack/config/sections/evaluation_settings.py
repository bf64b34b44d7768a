"""The section of `rlpack evaluate`."""

from pydantic import Field

from rlpack.config.sections.section import Count, Section


class Evaluate(Section):
    """What `rlpack evaluate` samples and measures; no recipe of `rlpack train` has this section."""

    samples: Count = Field(default=8, description="Samples of each prompt at rollout.temperature (n).")
    greedy: bool = Field(default=True, description="Whether to generate a greedy response to each prompt as well.")
    threshold: float | None = Field(
        default=None,
        description="A response passes if its reward is at least this; null is 1 if every reward is 0 or 1, and no "
        "pass@k otherwise.",
    )
    pass_at: tuple[Count, ...] = Field(
        default=(),
        strict=False,
        description="The k of pass@k, each at most evaluate.samples; [] is 1, 2, 4, … and evaluate.samples.",
    )
    resamples: Count = Field(default=2000, description="Bootstrap resamples of the prompts for the 95 % intervals.")
    prompts_per_part: Count = Field(
        default=64, description="Prompts that are answered and stored together; a kill loses at most these."
    )
    output_dir: str | None = Field(
        default=None,
        description="Directory of samples.jsonl, samples.html and results.json; null is "
        "evaluations/<model>-<hash of the arguments>.",
    )
    checkpoint: str | None = Field(
        default=None,
        description="Checkpoint of a run whose policy is evaluated. `rlpack evaluate RUN` sets it; it can't be given.",
    )
