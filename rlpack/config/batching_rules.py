"""Rules about batching: rows of a step, budgets that hold the longest rollout, and roles that cut sequences alike."""

from collections.abc import Iterator

from rlpack.config.errors import ConfigError
from rlpack.config.layout_remedies import cp_for
from rlpack.config.recipes import recipe_of
from rlpack.config.roles import (
    WITH_LAYOUTS,
    batching_key,
    batching_section,
    chunks_of,
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
from rlpack.config.token_budgets import batchings, holds, slots_of, with_microbatches
from rlpack.packing.batching import Batching

# Roles whose batching has to drop the same tokens.
_CUT_ALIKE = ("actor", "critic", "reference")
# The driver plans each step. More rows than this take it minutes.
MOST_ROWS = 1 << 20


def step_size_problems(config: Config) -> Iterator[str]:
    """Refuse steps of more rows than the driver can plan."""
    trainer = config.trainer
    rows = trainer.prompts_per_step * trainer.group_size
    if recipe_of(config).generates and rows > MOST_ROWS:
        yield (
            f"trainer.prompts_per_step ({trainer.prompts_per_step}) · trainer.group_size ({trainer.group_size}) is "
            f"{rows:,} rows, but a step has at most {MOST_ROWS:,}; lower trainer.prompts_per_step or trainer.group_size"
        )


def own_batching_problems(config: Config) -> Iterator[str]:
    """Refuse values of started roles that conflict with inherited ones, and batching of built-in roles in `roles`."""
    started = started_roles(config)
    for name, role in config.roles.items():
        if is_builtin(name) and role.batching != RoleBatching():
            sections = ("critic", "reference", "reward_model")
            home = "batching" if name == "actor" else f"{name}.batching" if name in sections else None
            remedy = f"set {home} instead" if home else f"the role {name} has no microbatches; remove it"
            yield f"roles.{name}.batching is set; {remedy}"
        if name not in started:
            continue
        try:
            role_batching(config, name)
            forward_batching(config, name)
        except ConfigError as error:
            yield from error.problems


def cut_problems(config: Config) -> Iterator[str]:
    """Refuse a critic or a reference that drops or truncates different rows from the actor, and passes that do so."""
    cuts = {}
    for role in _CUT_ALIKE:
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
                f"{key} cuts overlong sequences at different lengths from {batching_key(role)}, with overlong="
                f"{batching.overlong}, so the pass would cover different tokens from the update; leave "
                f"{key}.max_tokens, {key}.pad_to_multiple and {key}.length_multiple null, or set "
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


def alignment_problems(config: Config) -> Iterator[str]:
    """Refuse a token budget that doesn't hold even one alignment, whatever happens to overlong sequences.

    A key that several roles inherit is named once, with a value that is enough for all of them.
    """
    smallest: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for role in with_microbatches(config):
        for batching, forward in batchings(config, role):
            if batching.alignment <= batching.budget:
                continue
            key, cp, slots = (
                batching_section(config, role, "max_tokens", forward=forward),
                _cp(config, role),
                batching.alignment,
            )
            if batching.overlong == "error" and recipe_of(config).generates:
                slots = slots_of(batching, longest_rollout(config))
            smallest[key] = max(-(-slots // cp), smallest.get(key, 0))
            reasons.setdefault(key, _alignment_reason(config, role, batching, key, forward=forward))
    for key, reason in reasons.items():
        yield f"{reason}; set {key}.max_tokens={smallest[key]} or more, or lower the multiple"


def _alignment_reason(config: Config, role: str, batching: Batching, key: str, *, forward: bool) -> str:
    """Return the keys that raise the slots of every sequence of a role over its budget, which `key` sets."""
    cp, name = _cp(config, role), "pad_to_multiple" if batching.mode == "packed" else "length_multiple"
    multiple_key = batching_section(config, role, name, forward=forward)
    multiple = _own_value(config, role, name, forward=forward)
    chunks = chunks_of(role_parallel(config, role), cp) if role in WITH_LAYOUTS else 1
    shared = "" if cp == 1 else f" on each of the {cp} ranks of {role}.parallel.cp"
    cut = f", and cp_method=all_gather cuts each sequence into {chunks} chunks" if chunks > 1 else ""
    return (
        f"{key}.max_tokens is {batching.budget // cp} for the role {role}{shared}, under the slots of any sequence: "
        f"{multiple_key}.{name} is {multiple}{cut}"
    )


def token_budget_problems(config: Config) -> Iterator[str]:
    """Refuse a token budget under the longest possible rollout, which would fail hours later."""
    if not recipe_of(config).generates:
        return
    longest = longest_rollout(config)
    for role in with_microbatches(config):
        for batching, forward in batchings(config, role):
            if holds(batching, longest):
                continue
            # Alignments of its own may not fit into an inherited budget.
            key, cp = batching_section(config, role, "max_tokens", forward=forward), _cp(config, role)
            assert batching.max_tokens is not None
            shared = "" if cp == 1 else f" on each of the {cp} ranks that share a microbatch"
            slots = slots_of(batching, longest)
            fitting = cp_for(config, role, longest, forward=forward)
            way_out = "" if fitting is None else f"share it among ranks by {fitting}, "
            overlong = _overlong_remedy(config, role)
            yield (
                f"{key}.max_tokens is {batching.max_tokens // cp} for the role {role}{shared}, under the "
                f"{slots} slots that the longest sequence takes (data.max_prompt_tokens "
                f"{config.data.max_prompt_tokens} + rollout.max_new_tokens {config.rollout.max_new_tokens}); raise it "
                f"to {-(-slots // cp)} or more, {way_out}lower one of the two, or set {overlong}"
            )


def _overlong_remedy(config: Config, role: str) -> str:
    """Return how to allow sequences over a role's budget: by cutting them, or, where roles have other budgets, not."""
    section = batching_section(config, role, "overlong", forward=False)
    if section == "batching":
        changed = config.model_copy(update={"batching": config.batching.override(overlong="truncate")})
        if not any(cut_problems(changed)):
            return "batching.overlong=truncate"
    elif role not in _CUT_ALIKE:
        return f"{section}.overlong=truncate"
    return f"{section}.overlong=own_microbatch"


def _own_value(config: Config, role: str, name: str, *, forward: bool) -> int:
    """Return the value that is set for a role, before ranks that share tokens change it."""
    sections = *((own_forward_batching(config, role),) if forward else ()), own_batching(config, role)
    own = (getattr(section, name) for section in sections)
    return next((value for value in own if value is not None), getattr(config.batching, name))


def _cp(config: Config, role: str) -> int:
    return role_parallel(config, role).cp if role in WITH_LAYOUTS else 1
