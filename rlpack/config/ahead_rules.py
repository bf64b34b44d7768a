"""Rules of running ahead (`trainer.lead`)."""

from collections.abc import Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import pool_of, started_roles
from rlpack.config.schema import Config

# Called by the thread that draws, not while an earlier batch is trained on.
_DRAWING = ("rollout", "reward")


def ahead_problems(config: Config) -> Iterator[str]:
    """Yield why a run can't draw its batches ahead."""
    lead, spec = config.trainer.lead, recipe_of(config)
    if not lead:
        return
    if lead > 1:
        yield (
            f"trainer.lead is {lead}; it can be at most 1, because engines load new weights only when no batch is "
            "being drawn, so a second batch ahead would only wait; set trainer.lead=1"
        )
    if not spec.runs_ahead:
        why = "draws its batches itself" if spec.generates else "generates nothing"
        yield f"trainer.lead is {lead}, but recipe={config.recipe.name} {why}; set trainer.lead=0"
        return
    pool = pool_of(config, "rollout")
    sharing = [role for role in started_roles(config) if role not in _DRAWING and pool_of(config, role) == pool]
    if sharing:
        yield (
            f"trainer.lead is {lead}, but the pool {pool!r} of the role rollout also runs {', '.join(sharing)}; its "
            "processes would take turns, and nothing would overlap. Give rollout a pool of its own, "
            "as placement=two_pools does, or set trainer.lead=0"
        )
