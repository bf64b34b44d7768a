"""The spec of DAPO: its config section and rules."""

from collections.abc import Iterator

from pydantic import Field

from rlpack.config.recipes import RecipeSpec, recipe_section
from rlpack.config.schema import Config
from rlpack.config.sections.section import Count, NonNegative, Section


class Dapo(Section):
    """What recipe=dapo adds to GRPO (Yu et al. 2025, arXiv:2503.14476)."""

    max_rounds: Count = Field(
        default=8,
        description="Maximum rounds of drawing prompts per step, until trainer.prompts_per_step groups have differing "
        "rewards.",
    )
    overlong_buffer: int = Field(
        default=0,
        ge=0,
        description="Number of tokens before rollout.max_new_tokens over which the length penalty rises linearly; 0 "
        "for no penalty.",
    )
    overlong_penalty: NonNegative = Field(default=1.0, description="Length penalty at the end of the buffer.")
    overlong_filter: bool = Field(default=False, description="Exclude truncated responses from the loss.")


def groups_differ(config: Config) -> Iterator[str]:
    """Refuse groups of one, whose rewards can't differ."""
    if config.trainer.group_size == 1:
        yield "trainer.group_size is 1, but recipe=dapo trains on groups whose rewards differ; set it to 2 or more"


def buffer_fits(config: Config) -> Iterator[str]:
    """Refuse a length penalty that would begin before the response does."""
    buffer, longest = recipe_section(config, Dapo).overlong_buffer, config.rollout.max_new_tokens
    if buffer > longest:
        yield (
            f"dapo.overlong_buffer is {buffer}, over rollout.max_new_tokens={longest}; lower the buffer or raise the "
            "limit"
        )


def unused_penalty(config: Config) -> Iterator[str]:
    """Yield a warning if a length penalty is set without the tokens over which it rises."""
    settings = recipe_section(config, Dapo)
    if settings.overlong_buffer == 0 and settings.overlong_penalty != Dapo().overlong_penalty:
        yield f"dapo.overlong_penalty is {settings.overlong_penalty:g} but unused: dapo.overlong_buffer is 0"


SPEC = RecipeSpec(
    runs_ahead=True, sections={"dapo": Dapo}, rules=(groups_differ, buffer_fits), warnings=(unused_penalty,)
)
