"""Warnings about batching keys that are set without effect."""

from collections.abc import Collection, Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import batching_key, own_batching, own_forward_batching, role_batching, started_roles
from rlpack.config.schema import Config, RoleBatching, Trainer
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
    why = _why_no_old_logprobs(config)
    if why is not None and "actor" in started_roles(config):
        for name in own_forward_batching(config, "actor").model_dump(exclude_none=True):
            yield f"actor.forward_batching.{name} is set but unused: {why}"
    without_pass = set[str]() if why is None else {"actor"}
    yield from _of_other_modes(config, without_pass)


def _why_no_old_logprobs(config: Config) -> str | None:
    """Return why a run has no old-log-prob pass; None if it may have one.

    `rlpack.recipes.driver.policy_stages.needs_old_logprobs` decides in a run, and has the reasons.
    """
    trainer, algorithm = config.trainer, config.algorithm
    if not recipe_of(config).generates:
        return None
    if algorithm.correction.skips_old_logprobs:
        return "algorithm.correction.bypass=true leaves out the old-log-prob pass"
    if not config.recipe.target.startswith("rlpack."):  # others may have passes of their own
        return None
    if has_several_steps(trainer) or algorithm.correction.measures or config.actor.lora.dropout > 0:
        return None
    if _reads_kl_early(config):
        return None
    return (
        "a batch is one optimizer step, which needs no old-log-prob pass; it is used with a trainer."
        "mini_batch_size below the batch, or trainer.updates_per_batch above 1"
    )


def has_several_steps(trainer: Trainer) -> bool:
    """Return whether a batch may be several optimizer steps."""
    if trainer.updates_per_batch > 1 or trainer.mini_batch_size is None:
        return trainer.updates_per_batch > 1
    has_more_rows = trainer.late_groups.window > 1  # of earlier steps
    return has_more_rows or trainer.mini_batch_size < trainer.prompts_per_step * trainer.group_size


def _reads_kl_early(config: Config) -> bool:
    """Return whether the KL divergence from the reference may have to be known before the update."""
    algorithm = config.algorithm
    return algorithm.kl_coef > 0 and (
        algorithm.kl_placement == "reward"
        or ":" in algorithm.advantage  # a user's function may read it
        or not recipe_of(config).draws_once  # one that chooses prompts may also measure rows that it doesn't train on
    )


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
