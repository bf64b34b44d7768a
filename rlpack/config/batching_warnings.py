"""Warnings about batching keys that are set without effect."""

from collections.abc import Collection, Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import batching_key, own_batching, own_forward_batching, role_batching, started_roles
from rlpack.config.schema import Config, RoleBatching
from rlpack.config.sections.role_batching import ForwardBatching
from rlpack.config.token_budgets import with_microbatches
from rlpack.packing.batching import Batching, Mode

# Keys that only some modes read.
_MODES_OF: dict[str, tuple[Mode, ...]] = {
    "algorithm": ("packed",),
    "pad_to_multiple": ("packed",),
    "length_multiple": ("dynamic", "fixed"),
    "micro_batch_size": ("fixed",),
}


def batching_warnings(config: Config) -> Iterator[str]:
    """Yield batching keys that are set but that the mode of their role, or the recipe, doesn't read."""
    leaves_out = config.algorithm.correction.skips_old_logprobs and recipe_of(config).generates
    if leaves_out and "actor" in started_roles(config):
        for name in own_forward_batching(config, "actor").model_dump(exclude_none=True):
            yield (
                f"actor.forward_batching.{name} is set but unused: algorithm.correction.bypass=true leaves out the "
                "pass for old log-probs"
            )
    without_pass = {"actor"} if leaves_out else set[str]()
    yield from _of_other_modes(config, without_pass)


def _of_other_modes(config: Config, without_pass: Collection[str]) -> Iterator[str]:
    roles = with_microbatches(config)
    modes = {role_batching(config, role).mode for role in roles}
    default = Batching()
    for name, readers in _MODES_OF.items():
        if getattr(config.batching, name) != getattr(default, name) and modes.isdisjoint(readers):
            yield _text(f"batching.{name}", getattr(config.batching, name), config.batching.mode, readers)
    for role in roles:
        mode = role_batching(config, role).mode
        sections: dict[str, RoleBatching | ForwardBatching] = {batching_key(role): own_batching(config, role)}
        if role not in without_pass:
            sections[f"{role}.forward_batching"] = own_forward_batching(config, role)
        for key, section in sections.items():
            for name, value in section.model_dump(include=set(_MODES_OF), exclude_none=True).items():
                if mode not in _MODES_OF[name]:
                    yield _text(f"{key}.{name}", value, mode, _MODES_OF[name])


def _text(key: str, value: object, mode: str, readers: tuple[str, ...]) -> str:
    return f"{key} is {value} but unused: the mode is {mode}, and only {' and '.join(readers)} batching reads it"
