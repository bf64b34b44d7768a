"""The spec of ReMax: the column of the greedy baseline."""

from collections.abc import Iterator

from rlpack.config.recipes import RecipeSpec
from rlpack.config.schema import Config


def greedy_is_used(config: Config) -> Iterator[str]:
    """Yield a warning if the advantage function ignores the greedy responses."""
    if config.algorithm.advantage != "remax":
        yield f"algorithm.advantage is {config.algorithm.advantage}: the greedy responses are generated but not used"


SPEC = RecipeSpec(runs_ahead=True, draws_once=True, warnings=(greedy_is_used,), advantage_columns=("greedy_rewards",))
