"""The spec of GRPO: warnings about small groups."""

from collections.abc import Iterator

from rlpack.config.recipes import RecipeSpec
from rlpack.config.schema import Config


def small_groups(config: Config) -> Iterator[str]:
    """Yield warnings about groups that are too small to compare."""
    size = config.trainer.group_size
    if size == 1:
        yield "trainer.group_size is 1: a group of one has no advantage, so only the KL term is trained"
    if size == 2 and config.algorithm.scale == "std":
        yield "trainer.group_size is 2 and algorithm.scale is std: every advantage is -1, 0 or 1"


SPEC = RecipeSpec(warnings=(small_groups,))
