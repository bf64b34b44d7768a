"""The spec of GRPO: warnings about small groups."""

from collections.abc import Iterator

from rlpack.config.recipes import RecipeSpec
from rlpack.config.schema import Config


def small_groups(config: Config) -> Iterator[str]:
    """Yield warnings about groups that are too small to compare."""
    size, algorithm = config.trainer.group_size, config.algorithm
    compares = algorithm.advantage in ("group_relative", "opo") or algorithm.advantage_arguments.get("center_groups")
    if size == 1 and compares:
        yield (
            "trainer.group_size is 1: a group of one has no advantage, so only a KL term is trained; set it to "
            "2 or more, or choose recipe=remax or recipe=reinforce_plus_plus, which need no groups"
        )
    if size == 2 and algorithm.scale == "std" and algorithm.advantage == "group_relative":
        yield (
            "trainer.group_size is 2 and algorithm.scale is std: advantages that aren't 0 all have the same size, "
            "whatever the rewards are"
        )


SPEC = RecipeSpec(runs_ahead=True, draws_once=True, takes_late_groups=True, warnings=(small_groups,))
