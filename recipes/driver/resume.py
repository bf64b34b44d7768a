"""Finding the checkpoint that a run goes on from, and refusing one that another run wrote."""

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

# With another value of these the rest of the run would not be the rest of that run.
FIXED_KEYS = ("recipe", "seed", "model", "data", "sft_warmup")
# With another value of these a checkpoint's weights or moments would not be those of the run.
_OF_STATE = ("name", "freeze", "no_decay")
FIXED_BELOW = (
    "actor.lora.",
    "critic.path",
    "critic.revision",
    *(f"{role}.optimizer.{key}" for role in ("actor", "critic") for key in _OF_STATE),
)


@dataclass(frozen=True)
class Resumed:
    """A committed checkpoint, its files verified, and its state."""

    path: Path
    state: dict[str, Any]


def newest_checkpoint(directory: Path) -> Resumed | None:
    """Return the newest whole checkpoint of a run directory: the recipe's own steps come after the warm-up's.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged; beginning anew would overwrite what is left.
    """
    roots = [directory / "checkpoints" / phase for phase in ("train", "sft_warmup")]
    for root in roots:
        found = newest(root)
        if found is not None:
            return Resumed(found, load_state(found))
    for folder, fault in filter(None, map(newest_damage, roots)):
        raise CheckpointError(
            f"no checkpoint of run_dir={directory} can be loaded; the newest, {folder}, is damaged: {fault}; restore "
            "its files as they were written, or choose another run_dir to begin anew"
        )
    return None


def reference_folder(directory: Path) -> Path:
    """Return where a run directory keeps the policy that the recipe's own steps began with."""
    return directory / "checkpoints" / "reference"


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a run may not change when it goes on, dotted."""
    optimizer = {key: value for key, value in flat(config).items() if key.startswith(FIXED_BELOW)}
    return flat({key: config[key] for key in FIXED_KEYS}) | optimizer


def _ranks(config: Mapping[str, Any], role: str) -> int:
    """Return how many ranks share a role's weights out."""
    pools, roles = config["placement"]["pools"], config["placement"]["roles"]
    return pools[roles.get(role, next(iter(pools)))]["ranks"]


def _other_ranks(saved: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield a problem for each role whose 8-bit moments were written by another number of ranks."""
    values = config.model_dump(mode="json")
    for key, optimizer in optimizers(config).items():
        role = key.partition(".")[0]
        before, now = _ranks(saved, role), _ranks(values, role)
        if optimizer.name == "adamw_8bit" and before != now:
            yield (
                f"the {role} has {now} rank(s) and the checkpoint in run_dir={config.run_dir} was written by {before}; "
                "moments in 8 bits can't be shared out anew: set placement.pools.*.ranks as it was, or another run_dir"
            )


def check_same_run(saved: dict[str, Any], config: Config, *, has_reference: bool = True) -> None:
    """Refuse to go on with another recipe, seed, model, dataset or warm-up, or with a KL term to a policy that is gone.

    Args:
        saved: the checkpoint's configuration.
        config: the run's.
        has_reference: whether the policy that the recipe's own steps began with is there, or still to come.

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
            f"algorithm.kl_coef is {config.algorithm.kl_coef}, and run_dir={config.run_dir} goes on without a "
            "reference: the policy that it began with was not kept; set algorithm.kl_coef=0, or choose another run_dir"
        )
    if differing:
        raise ConfigError(differing)


def check_same_prompts(resumed: Resumed, config: Config, prompts: Prompts, held_out: Prompts) -> None:
    """Refuse to go on over other rows than the run began with: its place in them would mean other prompts.

    Raises:
        DataError: a file or dataset has changed since the checkpoint was written.
    """
    data = config.data
    sources = {"prompts": (prompts, data.source), "held_out": (held_out, data.validation_source or data.source)}
    for name, (found, source) in sources.items():
        if resumed.state[name] != found.fingerprint:
            raise DataError(
                f"{source} has other rows than when the checkpoint {resumed.path} was written; put them back as they "
                "were, or choose another run_dir"
            )
