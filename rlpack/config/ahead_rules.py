"""Rules of running ahead (`trainer.lead`)."""

from collections.abc import Container, Iterator
from itertools import chain, count

from rlpack.config.layout_sizes import layout_fits
from rlpack.config.model_sizes import model_fits
from rlpack.config.recipes import recipe_of
from rlpack.config.reward_rules import CALLS_SERVER
from rlpack.config.roles import WITH_LAYOUTS, gpus_per_rank, pool_of, scores, started_roles
from rlpack.config.schema import Config, builtin_roles

# Called by the thread that draws, not while an earlier batch is trained on.
_DRAWING = ("rollout", "reward")


def ahead_problems(config: Config) -> Iterator[str]:
    """Yield why a run can't draw its batches ahead."""
    lead, spec = config.trainer.lead, recipe_of(config)
    yield from _publish_problems(config)
    if config.trainer.late_groups.window > 1:
        yield from _late_problems(config)
    if not lead:
        return
    if not spec.runs_ahead:
        why = "draws its batches itself" if spec.generates else "generates nothing"
        yield f"trainer.lead is {lead}, but recipe={config.recipe.name} {why}; set trainer.lead=0"
        return
    pool = pool_of(config, "rollout")
    sharing = [role for role in started_roles(config) if role not in _DRAWING and pool_of(config, role) == pool]
    if sharing:
        yield (
            f"trainer.lead is {lead}, but the pool {pool!r} of the role rollout also runs {', '.join(sharing)}; its "
            f"processes would take turns, and nothing would overlap. {_engines_apart(config, pool)}, or set "
            "trainer.lead=0"
        )


def ahead_warnings(config: Config) -> Iterator[str]:
    """Yield scoring roles whose calls wait for those of roles that train, so that a lead hides less of the scoring.

    A rank answers one call at a time, so it doesn't even start to score in the background before an update ends.
    """
    if not config.trainer.lead or not recipe_of(config).runs_ahead:
        return
    roles, engines = started_roles(config), pool_of(config, "rollout")
    for role in (role for role in roles if scores(config, role)):
        pool = pool_of(config, role)
        busy = [one for one in roles if one != "rollout" and not scores(config, one) and pool_of(config, one) == pool]
        if busy and pool != engines:
            # A rank of engines with several GPUs can't have further roles.
            joins = role in _DRAWING and gpus_per_rank(config, "rollout") <= 1
            way_out = f"set placement.roles.{role}={engines}" if joins else _own_pool(config, role)
            yield (
                f"trainer.lead is {config.trainer.lead}, but the role {role} scores in the pool {pool!r}, which also "
                f"runs {', '.join(busy)}: scores of the next batch wait for every update; {way_out}"
            )


def new_engine_pool(pools: Container[str]) -> str:
    """Return a name for a new pool of engines.

    >>> new_engine_pool({"main"}), new_engine_pool({"main", "engines", "engines2"})
    ('engines', 'engines3')
    """
    names = chain(["engines"], (f"engines{number}" for number in count(2)))
    return next(name for name in names if name not in pools)


def _engines_apart(config: Config, pool: str) -> str:
    """Return how to give the engines a separate pool: of about half of the GPUs, or of another one if none is free."""
    present = config.placement.pools[pool]
    if not present.gpus_per_rank:
        return "Give rollout its own pool, as placement=two_pools does"
    name = new_engine_pool(config.placement.pools)
    sizes = sorted(range(1, present.ranks), key=lambda ranks: abs(2 * ranks - present.ranks))
    left = next((ranks for ranks in sizes if _pool_fits(config, pool, ranks)), present.ranks)
    settings = {f"placement.pools.{pool}.ranks": left} if left < present.ranks else {}
    settings |= {f"placement.pools.{name}.ranks": max(1, present.ranks - left)}
    settings |= {f"placement.pools.{name}.gpus_per_rank": f"{present.gpus_per_rank:g}"}
    # A rank of engines with several GPUs can't have further roles.
    joins = "reward" in started_roles(config) and pool_of(config, "reward") == pool and present.gpus_per_rank <= 1
    settings |= dict.fromkeys(["placement.roles.rollout", *["placement.roles.reward"] * joins], name)
    keys = " ".join(f"{key}={value}" for key, value in settings.items())
    return f"Give rollout its own pool{'' if left < present.ranks else ', on more GPUs'}: {keys}"


def _pool_fits(config: Config, pool: str, ranks: int) -> bool:
    """Return whether the roles with models in a pool can share them on another number of ranks."""
    placement = config.placement
    pools = {**placement.pools, pool: placement.pools[pool].model_copy(update={"ranks": ranks})}
    changed = config.model_copy(update={"placement": placement.model_copy(update={"pools": pools})})
    roles = [role for role in started_roles(config) if role in WITH_LAYOUTS and pool_of(config, role) == pool]
    return all(layout_fits(changed, role) and model_fits(changed, role, ranks) for role in roles)


def _own_pool(config: Config, role: str) -> str:
    """Return how to give a role its own pool, with the fewest ranks that its layout fits."""
    placement, present = config.placement, config.placement.pools[pool_of(config, role)]
    name = f"{role}_scores" if role in placement.pools else role
    on_cpu = config.roles[role].target in (builtin_roles()["reward"].target, *CALLS_SERVER)
    settings = {"ranks": 1, "gpus_per_rank": 0.0 if on_cpu else present.gpus_per_rank}
    for ranks in range(1, present.ranks + 1) if role in WITH_LAYOUTS else ():
        pools = {**placement.pools, name: present.model_copy(update={"ranks": ranks})}
        moved = placement.model_copy(update={"pools": pools, "roles": {**placement.roles, role: name}})
        changed = config.model_copy(update={"placement": moved})
        if layout_fits(changed, role) and model_fits(changed, role, ranks):
            settings["ranks"] = ranks
            break
    keys = " ".join(f"placement.pools.{name}.{key}={value:g}" for key, value in settings.items() if value)
    return f"give it its own pool: {keys} placement.roles.{role}={name}"


def _publish_problems(config: Config) -> Iterator[str]:
    """Yield what contradicts `rollout.publish`."""
    lead, rollout = config.trainer.lead, config.rollout
    if rollout.kv_cache == "keep":
        yield from _kept_cache_problems(config)
    if rollout.publish == "drain":
        if lead > 1:
            yield (
                f"trainer.lead is {lead}; with rollout.publish=drain it can be at most 1, because engines load new "
                "weights only when no batch is being drawn, so a second batch ahead would only wait; set "
                "trainer.lead=1, or rollout.publish=in_flight with rollout.engine=vllm"
            )
        return
    if not lead:
        yield (
            "rollout.publish is in_flight, but trainer.lead is 0, so nothing is generated while weights are published; "
            "set trainer.lead to 1 or more, or rollout.publish=drain"
        )
    if rollout.engine != "vllm":
        yield (
            f"rollout.publish is in_flight, but rollout.engine={rollout.engine} can't change weights within a "
            "response; set rollout.engine=vllm, or rollout.publish=drain"
        )
    if rollout.deterministic:
        yield (
            "rollout.deterministic is true, but with rollout.publish=in_flight tokens depend on the moment at which "
            "new weights come; set rollout.deterministic=false, or rollout.publish=drain"
        )
    if lead > 1 and recipe_of(config).runs_ahead and not recipe_of(config).draws_once:
        yield (
            f"trainer.lead is {lead}, but with recipe={config.recipe.name} the first prompt of a batch is known only "
            "once the previous batch is drawn; set trainer.lead=1"
        )


def _late_problems(config: Config) -> Iterator[str]:
    """Yield why a step can't leave groups of its batch to later ones."""
    trainer = config.trainer
    name = f"trainer.late_groups.window is {trainer.late_groups.window}"
    if not trainer.lead or config.rollout.publish == "drain":
        why = (
            "trainer.lead is 0, so nothing is generated while a step trains"
            if not trainer.lead
            else "with rollout.publish=drain new weights wait for all responses"
        )
        yield (
            f"{name}, but {why}; set trainer.late_groups.window=1, or trainer.lead=1 or more and "
            "rollout.publish=in_flight with rollout.engine=vllm"
        )
    if not recipe_of(config).takes_late_groups:
        yield (
            f"{name}, but recipe={config.recipe.name} needs all groups of a batch at once; set "
            "trainer.late_groups.window=1, or choose recipe=grpo or recipe=ppo"
        )
    elif not recipe_of(config).draws_once:
        yield (
            f"{name}, but with recipe={config.recipe.name} the first prompt of a batch is known only once the previous "
            "batch is drawn (RecipeSpec.draws_once); set trainer.late_groups.window=1"
        )
    if trainer.late_groups.share * trainer.prompts_per_step < 1:
        yield (
            f"{name}, but trainer.late_groups.share of {trainer.late_groups.share} of the {trainer.prompts_per_step} "
            "groups of trainer.prompts_per_step is less than one group; raise trainer.late_groups.share, or set "
            "trainer.late_groups.window=1"
        )


def _kept_cache_problems(config: Config) -> Iterator[str]:
    """Yield why the engines can't keep the KV cache of responses that continue with new weights."""
    rollout = config.rollout
    if rollout.publish == "drain":
        yield (
            "rollout.kv_cache is keep, but with rollout.publish=drain no response continues with new weights; set "
            "rollout.kv_cache=clear, or rollout.publish=in_flight"
        )
    if rollout.lora == "adapter":
        yield (
            "rollout.kv_cache is keep, but with rollout.lora=adapter every update is a new adapter, for which vLLM has "
            "a separate cache; set rollout.kv_cache=clear, or rollout.lora=merged"
        )
    if rollout.vllm.get("enable_prefix_caching") is False:
        yield (
            "rollout.kv_cache is keep, but rollout.vllm.enable_prefix_caching is false, so vLLM keeps nothing of a "
            "response that it interrupts; set rollout.kv_cache=clear, or remove enable_prefix_caching"
        )
