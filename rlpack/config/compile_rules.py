"""What compiled layers can't be combined with."""

from collections.abc import Iterator

from rlpack.config.model_sizes import model_sizes
from rlpack.config.roles import (
    WITH_LAYOUTS,
    batching_key,
    optimizers,
    own_batching,
    role_compute,
    role_parallel,
    runs_packed,
    started_roles,
)
from rlpack.config.schema import Config


def compile_problems(config: Config) -> Iterator[str]:
    """Yield why the layers of a role can't be compiled."""
    for role in started_roles(config):
        if role not in WITH_LAYOUTS or not role_compute(config, role).compile:
            continue
        key, settings, parallel = f"{role}.compile", role_compute(config, role), role_parallel(config, role)
        if experts := model_sizes(config, role).experts:
            yield (
                f"{key} is set, but the model has {experts} experts, whose numbers of tokens change with every row, so "
                f"its layers would be compiled repeatedly; set {key}=false"
            )
        if not runs_packed(config, role):
            section = "batching" if own_batching(config, role).mode is None else batching_key(role)
            yield f"{key} is set, but compiles layers for packed rows only; set {section}.mode=packed or {key}=false"
        if settings.gradient_checkpointing == "selective":
            yield (
                f"{key} hides the operations whose outputs {role}.gradient_checkpointing=selective keeps; set "
                f"{role}.gradient_checkpointing to full or none, or {key}=false"
            )
        if settings.offload == "parameters":
            optimizer = optimizers(config).get(f"{role}.optimizer")  # None for a role that isn't trained
            other = "optimizer" if optimizer is not None and optimizer.name != "adamw_8bit" else "none"
            yield f"{key} and {role}.offload=parameters can't be combined; set {role}.offload={other} or {key}=false"
        sizes = {name: getattr(parallel, name) for name in ("tp", "cp", "ep", "pp")}
        split = ", ".join(f"{role}.parallel.{name}={size}" for name, size in sizes.items() if size > 1)
        if split:
            yield f"{key} compiles whole layers, which {split} divides; set {key}=false, or shard only with dp_shard"
    if config.actor.compile and config.actor.lora.rank > 0:
        yield (
            f"actor.compile and actor.lora.rank={config.actor.lora.rank} can't be combined: adapters change between "
            "training and evaluation, for which layers would be compiled again; set actor.compile=false"
        )
