"""The section of prompt groups that are not finished when their step begins."""

from pydantic import Field

from rlpack.config.sections.section import Count, Section


class LateGroupSettings(Section):
    """A window for stragglers, with rollout.publish=in_flight."""

    window: Count = Field(
        default=1,
        le=64,
        description="Number of steps in which the groups of a batch may be trained on. Groups that are not finished "
        "when their step begins can be used by one of the next window - 1 steps, so that training waits for fewer "
        "stragglers. Tokens are then up to trainer.lead + window - 1 policy versions old, and which groups a step "
        "trains on depends on timing. 1 waits for all groups.",
    )
    share: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="With a window above 1, the largest share of a batch's groups that its step leaves to later ones.",
    )
