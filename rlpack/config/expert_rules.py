"""Rules of mixtures of experts (`actor.moe`)."""

from collections.abc import Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.schema import Config

_KEY = "actor.moe.replay_routing"


def expert_problems(config: Config) -> Iterator[str]:
    """Yield why the routing of experts can't be replayed."""
    if not config.actor.moe.replay_routing:
        return
    if config.batching.share_prompts:
        yield (
            f"batching.share_prompts routes the tokens of a prompt once for several rows, and {_KEY} records experts "
            f"for each row, which may differ by rounding; set batching.share_prompts=false or {_KEY}=false"
        )
    if not recipe_of(config).generates:
        yield f"{_KEY} is set, but recipe={config.recipe.name} has no old log-probs; set {_KEY}=false"
    elif config.algorithm.correction.skips_old_logprobs:
        yield (
            f"{_KEY} replays the routing of the old log-probs, which algorithm.correction.bypass doesn't compute; set "
            f"{_KEY}=false, algorithm.correction.bypass=false, or algorithm.correction.reject, which needs them"
        )
