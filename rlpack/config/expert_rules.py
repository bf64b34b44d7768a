"""Rules of mixtures of experts (`actor.moe`)."""

from collections.abc import Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.schema import Config

_KEY = "actor.moe.replay_routing"


def expert_problems(config: Config) -> Iterator[str]:
    """Yield why the routing of experts can't be replayed, or their load not be balanced."""
    if config.batching.share_prompts:
        for key in ("balance_coefficient", "replay_routing"):
            if getattr(config.actor.moe, key):
                yield (
                    f"batching.share_prompts routes the tokens of a prompt once for several rows, and actor.moe.{key} "
                    f"counts them for each row; set batching.share_prompts=false, or leave actor.moe.{key} out"
                )
    if not config.actor.moe.replay_routing:
        return
    if not recipe_of(config).generates:
        yield f"{_KEY} is set, but recipe={config.recipe.name} has no old log-probs; set {_KEY}=false"
    elif config.algorithm.correction.bypass:
        yield (
            f"{_KEY} replays the routing of the old log-probs, which algorithm.correction.bypass doesn't compute; set "
            f"{_KEY}=false or algorithm.correction.bypass=false"
        )
