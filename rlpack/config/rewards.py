"""The sections that say how responses are scored."""

from typing import Any

from pydantic import Field

from rlpack.config.section import Section


class Reward(Section):
    """The verifiable reward."""

    function: str = Field(
        default="rlpack.rewards.functions:final_answer",
        description="package.module:function, called as f(prompts, completions, **columns) -> list[float | None].",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of the function.")
