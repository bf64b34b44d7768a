"""Resuming: find the checkpoint to continue from, and refuse one that another run wrote."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpack.batch.errors import DataError
from rlpack.checkpoint.commit import load_state, newest, newest_damage
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.errors import ConfigError
from rlpack.config.redaction import without_secrets
from rlpack.config.roles import optimizers
from rlpack.config.schema import Config
from rlpack.data.prompts import Prompts
from rlpack.observe.run_dir import flat

# Keys that determine the steps of a run.
FIXED_KEYS = ("recipe", "seed", "model", "data", "sft_warmup")
# Keys that determine which weights and moments a checkpoint holds.
_OPTIMIZER_KEYS = ("name", "freeze", "no_decay")
FIXED_PREFIXES = (
    "actor.lora.",
    "critic.path",
    "critic.revision",
    *(f"{role}.optimizer.{key}" for role in ("actor", "critic") for key in _OPTIMIZER_KEYS),
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A committed checkpoint whose files are verified, and its state."""

    path: Path
    state: dict[str, Any]


def newest_checkpoint(directory: Path) -> LoadedCheckpoint | None:
    """Return the newest intact checkpoint of a run directory.

    The recipe's checkpoints are newer than the warm-up's.

    Raises:
        CheckpointError: all checkpoints are damaged; starting over would overwrite what is left of them.
    """
    roots = [directory / "checkpoints" / phase for phase in ("train", "sft_warmup")]
    for root in roots:
        path = newest(root)
        if path is not None:
            return LoadedCheckpoint(path, load_state(path))
    for folder, fault in filter(None, map(newest_damage, roots)):
        raise CheckpointError(
            f"no checkpoint of run_dir={directory} can be loaded; the newest, {folder}, is damaged: {fault}; restore "
            "its files, or choose another run_dir to start over"
        )
    return None


def reference_folder(directory: Path) -> Path:
    """Return the folder of the reference policy: the policy that the recipe's own steps began with."""
    return directory / "checkpoints" / "reference"


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a resumed run may not change, by dotted key."""
    optimizer = {key: value for key, value in flat(config).items() if key.startswith(FIXED_PREFIXES)}
    return flat({key: config[key] for key in FIXED_KEYS}) | optimizer


def _ranks(config: Mapping[str, Any], role: str) -> int:
    """Return the number of ranks that a role's weights are sharded over."""
    pools, roles = config["placement"]["pools"], config["placement"]["roles"]
    return pools[roles.get(role, next(iter(pools)))]["ranks"]


def _other_ranks(saved: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield a problem for each role whose 8-bit moments would be resharded."""
    values = config.model_dump(mode="json")
    for key, optimizer in optimizers(config).items():
        role = key.partition(".")[0]
        before, now = _ranks(saved, role), _ranks(values, role)
        if optimizer.name == "adamw_8bit" and before != now:
            yield (
                f"the {role} has {now} rank(s) and the checkpoint in run_dir={config.run_dir} was written by {before}; "
                "8-bit moments can't be resharded: set placement.pools.*.ranks as it was, or choose another run_dir"
            )


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
    before, now = (_fixed(values) for values in (saved, without_secrets(config.model_dump(mode="json"))))
    differing = [
        f"{key} is {now.get(key)!r} and the checkpoint in run_dir={config.run_dir} was written with "
        f"{before.get(key)!r}; set {key} as it was, or choose another run_dir"
        for key in sorted(before.keys() | now.keys())
        if now.get(key) != before.get(key)
    ]
    differing += _other_ranks(saved, config)
    if config.algorithm.kl_coef > 0 and not has_reference:
        differing.append(
            f"algorithm.kl_coef is {config.algorithm.kl_coef}, and run_dir={config.run_dir} has no reference: the "
            "policy that the run began with was not stored; set algorithm.kl_coef=0, or choose another run_dir"
        )
    if differing:
        raise ConfigError(differing)


def check_same_prompts(checkpoint: LoadedCheckpoint, config: Config, prompts: Prompts, held_out: Prompts) -> None:
    """Refuse to resume over changed datasets, in which the run's position would refer to other prompts.

    Raises:
        DataError: a file or dataset has changed since the checkpoint was written.
    """
    data = config.data
    sources = {"prompts": (prompts, data.source), "held_out": (held_out, data.validation_source or data.source)}
    for name, (split, source) in sources.items():
        if checkpoint.state[name] != split.fingerprint:
            raise DataError(
                f"{source} has other rows than when the checkpoint {checkpoint.path} was written; restore them, or "
                "choose another run_dir"
            )
