"""Compare a resumed run with the configuration that its checkpoint was written with."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpack import __version__
from rlpack.checkpoint.commit import newest_state
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.errors import ConfigError
from rlpack.config.redaction import without_secrets
from rlpack.config.roles import optimizers
from rlpack.config.schema import Config
from rlpack.counted import counted
from rlpack.observe.run_dir import CHECKPOINTS, CONFIG, flat
from rlpack.startup.model_paths import KEYS, is_same_model

STATE_KEYS = {"progress", "config", "prompts", "held_out", "reference", "records"}
_PHASES = ("train", "sft_warmup")
# Sections of a stored config that are read here.
_SECTIONS = ("recipe", "model", "data", "sft_warmup", "placement", "trainer", "evaluation")
_BUILT_IN = "rlpack.recipes."
_QUOTES = "\"'"
# Maximum number of differing keys that an error names.
_SHOWN_KEYS = 8
# Keys that determine the steps of a run.
FIXED_KEYS = ("recipe", "seed", "model", "data", "sft_warmup")
# Keys that determine which weights and moments a checkpoint holds.
_OPTIMIZER_KEYS = ("name", "freeze", "no_decay")
FIXED_PREFIXES = (
    "trainer.lead",
    "rollout.publish",
    "actor.lora.",
    "critic.path",
    "critic.revision",
    *(f"{role}.optimizer.{key}" for role in ("actor", "critic") for key in _OPTIMIZER_KEYS),
)


def check_resumed(config: Config) -> None:
    """Refuse to resume with values that differ from the newest checkpoint's, which is not verified yet.

    Raises:
        ConfigError: see `check_same_run` and `check_steps`.
        CheckpointError: another version of rlpack wrote the checkpoint.
    """
    if config.resume != "auto" or config.run_dir is None:
        return
    for phase in _PHASES:
        root = Path(config.run_dir) / CHECKPOINTS / phase
        state = newest_state(root)
        if state is not None:
            check_fields(state, root / f"step-{state['step']}")
            check_same_run(state["config"], config)
            check_steps(state["progress"], config)
            return


def check_fields(state: Mapping[str, Any], checkpoint: Path) -> None:
    """Check that a checkpoint's state has the fields that this version writes, which its format promises.

    Raises:
        CheckpointError: fields are missing.
    """
    config, progress = state.get("config"), state.get("progress")
    if (
        not state.keys() >= STATE_KEYS
        or not (isinstance(config, dict) and config.keys() >= {*FIXED_KEYS, *_SECTIONS})
        or not all(isinstance(config[section], dict) for section in _SECTIONS)
        or not _is_placement(config["placement"])
        or not (isinstance(progress, dict) and progress.keys() >= {"phase", "step"})
        or progress["phase"] not in _PHASES
        or not (type(progress["step"]) is int and progress["step"] >= 0)
    ):
        raise other_fields(state, checkpoint)


def _is_placement(values: Mapping[str, Any]) -> bool:
    """Return whether a stored placement has pools with numbers of ranks, and a pool for each role that it names."""
    pools, roles = values.get("pools"), values.get("roles")
    return (
        isinstance(pools, dict)
        and len(pools) > 0
        and all(isinstance(pool, dict) and type(pool.get("ranks")) is int for pool in pools.values())
        and isinstance(roles, dict)
        and all(isinstance(pool, str) and pool in pools for pool in roles.values())
    )


def other_fields(state: Mapping[str, Any], checkpoint: Path) -> CheckpointError:
    """Return the error of a state whose fields differ from those that this version writes."""
    version = ascii(state.get("rlpack")).strip(_QUOTES)
    return CheckpointError(
        f"checkpoint {checkpoint} has other fields in its state.json than rlpack {__version__} writes; it was written "
        f"by rlpack {version:.60}: resume with that version, or choose another run_dir"
    )


def check_steps(progress: Mapping[str, Any], config: Config, data_epochs: float | None = None) -> None:
    """Refuse to resume a run that has already done more than its number of steps, if that is known yet.

    Args:
        progress: what the run has done.
        config: the whole configuration.
        data_epochs: `trainer.data_epochs`, if the number of steps in `config` follows from it.

    Raises:
        ConfigError: names both numbers.
    """
    done, steps = progress["step"], config.trainer.known_steps
    if progress["phase"] == "train" and steps is not None and done > steps:
        given, remedy = f"trainer.steps is {steps}", f"set trainer.steps to {done} or more"
        if data_epochs is not None:
            given = f"trainer.data_epochs is {data_epochs:g}, which is {steps} steps"
            remedy = "raise trainer.data_epochs"
        raise ConfigError(
            [
                f"{given}, but the run in run_dir={config.run_dir} has done {done} steps; {remedy}, or choose another "
                "run_dir"
            ]
        )


def saved_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `model` of a stored configuration, also of a version without `tokenizer_revision`.

    Such a version loaded a tokenizer from another repository at `model.revision`. A folder has no revision.
    """
    model = config["model"]
    tokenizer = model.get("tokenizer")
    if "tokenizer_revision" in model or tokenizer in (None, model.get("path")):
        return model
    is_folder = Path(os.path.expanduser(tokenizer)).is_dir()
    return model | {"tokenizer_revision": None if is_folder else model.get("revision")}


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a resumed run may not change, by dotted key."""
    optimizer = {key: value for key, value in flat(config).items() if key.startswith(FIXED_PREFIXES)}
    return flat({key: config[key] for key in FIXED_KEYS}) | optimizer


def _shards(config: Mapping[str, Any], role: str) -> tuple[int, int, int]:
    """Return how many ranks each layer of a role is divided among, how many share weights, and how many experts."""
    pools, roles = config["placement"]["pools"], config["placement"]["roles"]
    ranks = pools[roles.get(role, next(iter(pools)))]["ranks"]
    others = _size(config, role, "dp_replicate") * _size(config, role, "pp")
    return ranks // others, _size(config, role, "tp"), _size(config, role, "ep")


def _size(config: Mapping[str, Any], role: str, key: str) -> int:
    """Return a size of a role's `parallel`, 1 in a checkpoint of a version without the key."""
    for name in (role, "actor"):
        section = config.get(name)
        parallel = section.get("parallel") if isinstance(section, dict) else None
        size = parallel.get(key) if isinstance(parallel, dict) else None
        if type(size) is int and size > 0:
            return size
    return 1


def _other_ranks(saved: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield a problem for each role whose 8-bit moments would be resharded."""
    values = config.model_dump(mode="json")
    for key, optimizer in optimizers(config).items():
        role = key.partition(".")[0]
        before, now = _shards(saved, role), _shards(values, role)
        if optimizer.name == "adamw_8bit" and before != now:
            differing = [place for place in (1, 2) if now[place] != before[place]]
            names = {1: "tp", 2: "ep"}
            shared = "".join(f" with {role}.parallel.{names[place]}={now[place]}" for place in differing)
            old_shared = "".join(f" with {names[place]}={before[place]}" for place in differing)
            yield (
                f"the {role} is sharded over {counted(now[0], 'rank')}{shared} and the checkpoint in "
                f"run_dir={config.run_dir} was written by {before[0]}{old_shared}; 8-bit moments can't be resharded: "
                f"set placement.pools.*.ranks, {role}.parallel.dp_replicate, .tp and .ep as they were, or choose "
                "another run_dir"
            )


def _other_values(before: Mapping[str, Any], now: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield a problem for the key that differs, or one for all keys if several do."""
    keys = [key for key in sorted(before.keys() | now.keys()) if now.get(key) != before.get(key)]
    # If a section is empty on one side only, the keys of the other side are named.
    keys = [
        key
        for key in keys
        if not any(one.get(key) == {} and key not in two for one, two in ((before, now), (now, before)))
    ]
    if keys == ["recipe.target"] and all(one["recipe.target"].startswith(_BUILT_IN) for one in (before, now)):
        name, old = (one["recipe.target"].removeprefix(_BUILT_IN) for one in (now, before))
        yield (
            f"recipe is {name}, and the checkpoint in run_dir={config.run_dir} was written with {old}; set "
            f"recipe={old}, or the preset that the run used, or choose another run_dir"
        )
    elif len(keys) == 1:
        yield (
            f"{keys[0]} is {now.get(keys[0])!r} and the checkpoint in run_dir={config.run_dir} was written with "
            f"{before.get(keys[0])!r}; set {keys[0]} as it was, or choose another run_dir"
        )
    elif keys:
        shown = ", ".join(f"{key} ({_text(now, key)}, was {_text(before, key)})" for key in keys[:_SHOWN_KEYS])
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        yield (
            f"{len(keys)} keys differ from those that the checkpoint in run_dir={config.run_dir} was written with: "
            f"{shown}{more}. A resumed run needs all overrides of the run ({Path(config.run_dir or '.') / CONFIG} has "
            "its values): repeat them, or choose another run_dir"
        )


def _text(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "unset"


def check_same_run(saved: dict[str, Any], config: Config, *, has_reference: bool = True) -> None:
    """Refuse to resume with another recipe, seed, model, dataset or warm-up.

    A KL term is refused, too, if the run's reference policy was not stored.

    Args:
        saved: the checkpoint's configuration.
        config: the run's.
        has_reference: whether the reference policy is stored, or the recipe's own steps, which store it, are yet to
            begin.

    Raises:
        ConfigError: names each key that differs, with both values.
    """
    now = _fixed(without_secrets(config.model_dump(mode="json")))
    before = _fixed(saved | {"model": saved_model(saved)})
    before |= {key: now[key] for key in KEYS if key in now and key in before and is_same_model(before[key], now[key])}
    differing = list(_other_values(before, now, config))
    differing += _other_ranks(saved, config)
    if config.algorithm.kl_coef > 0 and not has_reference:
        differing.append(
            f"algorithm.kl_coef is {config.algorithm.kl_coef}, but run_dir={config.run_dir} has no reference: the "
            "policy that the run began with was not stored; set algorithm.kl_coef=0, or choose another run_dir"
        )
    if differing:
        raise ConfigError(differing)
