"""Rules about batching: budgets that hold the longest rollout, and roles that cut overlong sequences alike."""

from collections.abc import Iterator

from rlpack.config.errors import ConfigError
from rlpack.config.layout_sizes import cp_for
from rlpack.config.recipes import recipe_of
from rlpack.config.roles import (
    WITH_LAYOUTS,
    batching_key,
    forward_batching,
    is_builtin,
    longest_rollout,
    own_batching,
    own_forward_batching,
    role_batching,
    role_parallel,
    started_roles,
)
from rlpack.config.schema import Config, RoleBatching
from rlpack.packing.batching import Batching


def own_batching_problems(config: Config) -> Iterator[str]:
    """Refuse values that conflict with the inherited ones, and batching of built-in roles below `roles`."""
    for name, role in config.roles.items():
        if is_builtin(name) and role.batching != RoleBatching():
            sections = ("critic", "reference", "reward_model")
            home = "batching" if name == "actor" else f"{name}.batching" if name in sections else None
            remedy = f"set {home} instead" if home else f"the role {name} has no microbatches; remove it"
            yield f"roles.{name}.batching is set; {remedy}"
        try:
            role_batching(config, name)
            forward_batching(config, name)
        except ConfigError as error:
            yield from error.problems


def cut_problems(config: Config) -> Iterator[str]:
    """Refuse a critic or a reference that drops or truncates other rows than the actor, and passes that do so."""
    cuts = {}
    for role in ("actor", "critic", "reference"):
        if role not in started_roles(config):
            continue
        try:
            batching, forward = role_batching(config, role), forward_batching(config, role)
        except ConfigError:
            return  # another rule says why
        cuts[role] = _cut(batching)
        if forward is not None and _cut(forward) != _cut(batching):
            key = f"{role}.forward_batching"
            yield (
                f"{key} cuts overlong sequences at other lengths than {batching_key(role)}, with overlong="
                f"{batching.overlong}, so the pass would cover other tokens than the update; leave {key}.max_tokens, "
                f"{key}.pad_to_multiple and {key}.length_multiple null, or set "
                f"{batching_key(role)}.overlong=error or own_microbatch"
            )
    for role, cut in cuts.items():
        if cut != cuts.get("actor", cut):  # without an actor, another rule refuses
            yield (
                f"the actor's batching and {role}.batching cut overlong sequences differently, so some trained tokens "
                f"would have no values of the {role}; set the same mode, max_tokens, multiple and overlong for both"
            )


def _cut(batching: Batching) -> tuple[str, int | None, str, int] | None:
    """Return what decides which tokens a batching drops; None if it drops none."""
    if batching.overlong not in {"truncate", "drop"}:
        return None
    return batching.overlong, batching.max_tokens, batching.mode, batching.alignment


def token_budget_problems(config: Config) -> Iterator[str]:
    """Refuse a token budget under the longest possible rollout, which would fail hours later."""
    if not recipe_of(config).generates:
        return
    longest = longest_rollout(config)
    for role in started_roles(config):
        if role in {"rollout", "reward"}:
            continue
        own, forward = own_batching(config, role), forward_batching(config, role)
        key, overlong = (
            "batching" if value is None else batching_key(role) for value in (own.max_tokens, own.overlong)
        )
        yield from _too_small(config, role, role_batching(config, role), longest, (key, overlong))
        if forward is not None:
            # Alignments of its own may not fit into an inherited budget.
            inherits = own_forward_batching(config, role).max_tokens is None
            keys = key if inherits else f"{role}.forward_batching", overlong
            yield from _too_small(config, role, forward, longest, keys)


def _too_small(config: Config, role: str, batching: Batching, longest: int, keys: tuple[str, str]) -> Iterator[str]:
    """Yield a problem if a budget doesn't hold the longest sequence; `keys` set `max_tokens` and `overlong`."""
    slots = -(-longest // batching.alignment) * batching.alignment
    if batching.overlong != "error" or batching.max_tokens is None or slots <= batching.max_tokens:
        return
    cp = role_parallel(config, role).cp if role in WITH_LAYOUTS else 1
    per_rank, way_out = batching.max_tokens // cp, ""
    if role in WITH_LAYOUTS and (fitting := cp_for(config, role, slots, per_rank)) is not None:
        way_out = f"share it among ranks by {role}.parallel.cp={fitting}, "
    shared = "" if cp == 1 else f" on each of the {cp} ranks that share a microbatch"
    yield (
        f"{keys[0]}.max_tokens is {per_rank} for the role {role}{shared}, under the {slots} slots that the "
        f"longest sequence takes (data.max_prompt_tokens {config.data.max_prompt_tokens} + rollout.max_new_tokens "
        f"{config.rollout.max_new_tokens}); raise it, {way_out}lower one of the two, or set "
        f"{keys[1]}.overlong=truncate"
    )
