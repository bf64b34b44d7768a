"""What `rlpack evaluate` evaluates: a model, or a run's checkpoint with the run's configuration.

Nothing is written, so a run in progress can be evaluated. Files are verified by their hashes before any is read.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpack.checkpoint.commit import load_state, saved_steps
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.publish import MARKER
from rlpack.checkpoint.validity import fault_of
from rlpack.config.schema import BUILTIN_ROLES, Config, Data, builtin_roles
from rlpack.models.errors import ModelError
from rlpack.observe.errors import EvaluationError
from rlpack.observe.run_dir import CHECKPOINTS, holds_run
from rlpack.startup.given_model import find_folder
from rlpack.startup.same_run import check_fields, saved_model

logger = logging.getLogger(__name__)

# The recipe's checkpoints are newer than the warm-up's, and their steps have the same numbers.
_PHASES = {"train": "training", "sft_warmup": "warm-up"}
_CHOICE = re.compile(rf"(?:({'|'.join(_PHASES)})/)?([0-9]+)")
# The evaluated policy is this role's.
_ROLE = "actor"
_SECTIONS = ("seed", "data", "reward", "rollout", "job")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model, or a run's checkpoint.

    Attributes:
        name: name used in the default directory of the evaluation.
        path: absolute path of the model's folder, or its name on the Hub; None for a checkpoint.
        checkpoint: its folder, absolute; None for a model.
        state: the checkpoint's state; empty for a model.
    """

    name: str
    path: str | None = None
    checkpoint: Path | None = None
    state: Mapping[str, Any] | None = None


def find_model(given: str, choice: str | None) -> EvaluatedModel:
    """Resolve a path or a name.

    Args:
        given: a model's folder, its name on the Hub, or a run directory.
        choice: the run's checkpoint: `N` for that of step N of the training, or of the warm-up if the run has no
            checkpoint of the training; `train/N` or `sft_warmup/N`; None for the newest intact one. A newer one that
            is damaged is skipped with a warning, but a checkpoint of the warm-up never replaces those of the training.

    Raises:
        ModelError: there is no such folder, it holds neither a model nor a run, or a checkpoint is chosen for a model.
        EvaluationError: the run has no checkpoint, or not the chosen one.
        CheckpointError: all checkpoints that were asked for are damaged, or another version wrote them.
    """
    folder = find_folder(given)
    if folder is not None and holds_run(folder):
        checkpoint, state = _checkpoint(folder, choice)
        name = f"{folder.resolve().name}-{checkpoint.name}"
        return EvaluatedModel(name, checkpoint=checkpoint.resolve(), state=state)
    if choice is not None:
        raise ModelError(
            f"--checkpoint {choice} needs the directory of a run, but {given!r} is not one; leave it out to evaluate a "
            "model"
        )
    if folder is not None:
        if (folder / MARKER).exists() and not (folder / "config.json").exists():  # exported models are marked, too
            if folder.absolute().parent.name == "reference":
                raise ModelError(
                    f"{given!r} is what a run stores of its reference, which can't be evaluated; give the model that "
                    "the run started from, or a checkpoint of the run: rlpack evaluate RUN --checkpoint N"
                )
            raise ModelError(
                f"{given!r} is a checkpoint, without the model's config; give its run: rlpack evaluate "
                f"{folder.absolute().parents[2]} --checkpoint {choice_of(folder.absolute())}"
            )
        return EvaluatedModel(folder.resolve().name, path=str(folder.resolve()))
    return EvaluatedModel(given.replace("/", "-"), path=given)


def run_config(state: Mapping[str, Any]) -> Config:
    """Return the configuration that a checkpoint's policy and its tokenizer were built with.

    A tokenizer of characters is built from the prompts of the section `evaluation`, too.
    """
    saved, names = state["config"], ("seed", "model", "data", "rollout", "actor", "evaluation")
    return Config.model_validate({name: saved[name] for name in names} | {"model": saved_model(saved)})


def held_out_source(config: Config) -> str:
    """Return the source of a run's held-out prompts."""
    return config.data.held_out[0]


def with_dtype_of(run: Config | None, config: Config) -> Config:
    """Return an evaluation's configuration with the type that the run's vLLM generated in, unless one is set.

    Args:
        run: what the checkpoint's policy was built with; None for a model, whose type is read from its own config.
        config: configuration of the evaluation.
    """
    if run is None or config.rollout.engine != "vllm" or config.rollout.dtype is not None:
        return config
    dtype = run.rollout.dtype or run.actor.precision
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"dtype": dtype})})


def run_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a checkpoint's configuration that an evaluation takes over.

    The data are the held-out prompts. Pools of other roles are left out, and so is `judge` if it is another role's.
    """
    saved = state["config"]
    values = {name: saved[name] for name in _SECTIONS if name in saved}
    data = values["data"]
    source, subset = Data.model_validate(data).held_out
    values["data"] = data | {"source": source, "subset": subset, "validation_source": None, "validation_subset": None}
    own = {name: saved["roles"][name] for name in ("rollout", "reward") if name in saved["roles"]}
    builtin = {name: role.model_dump(mode="json") for name, role in builtin_roles().items()}
    values["roles"] = builtin | own
    if values["roles"]["reward"]["target"] != builtin["reward"]["target"] and "judge" in saved:
        values["judge"] = saved["judge"]
    placement = saved["placement"]
    pools, roles = placement["pools"], placement["roles"]
    rollout, reward = (roles.get(name, next(iter(pools))) for name in ("rollout", "reward"))
    values["placement"] = placement | {
        "pools": {name: pools[name] for name in dict.fromkeys((rollout, reward))},
        "roles": dict.fromkeys(BUILTIN_ROLES, rollout) | {"reward": reward},
    }
    return values


def _checkpoint(run_dir: Path, choice: str | None) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the state of a run's checkpoint; `choice` is that of `find_model`."""
    phase, step = (None, None) if choice is None else _parse_choice(choice)
    folders = {name: _folders(run_dir / CHECKPOINTS / name) for name in _PHASES}
    if not any(folders.values()):
        exported = run_dir / "model"
        model = str(exported) if exported.is_dir() else "a model's folder"
        raise EvaluationError(
            f"the run in {run_dir} has no checkpoint; wait for its first (checkpoint.every), or evaluate {model}"
        )
    phase = phase or next(name for name in _PHASES if folders[name])
    asked = [folder for folder in folders[phase] if step is None or folder.name == f"step-{step}"]
    if not asked:
        of_step = "" if step is None else f" of step {step}"
        raise EvaluationError(
            f"the run in {run_dir} has no {_PHASES[phase]} checkpoint{of_step}; set --checkpoint to one that it has: "
            f"{_existing(folders)}"
        )
    faults: list[str] = []
    for folder in asked:
        fault = fault_of(folder)
        if fault is None:
            for text in faults:
                logger.warning("a newer checkpoint is skipped: %s", text)
            return folder, _state(folder)
        faults.append(f"{folder}: {fault if folder.exists() else 'the run has since deleted it'}")
    raise CheckpointError(
        f"no checkpoint of the run in {run_dir} that was asked for can be loaded: {'; '.join(faults)}; restore "
        f"damaged files, or choose another with --checkpoint (there are {_existing(folders)})"
    )


def _existing(folders: Mapping[str, Sequence[Path]]) -> str:
    """Return the values of `--checkpoint` that a run has."""
    return ", ".join(choice_of(folder) for name in _PHASES for folder in folders[name] if folder.exists())


def _parse_choice(choice: str) -> tuple[str | None, int]:
    """Return the phase, None if it isn't named, and the step of `--checkpoint`."""
    match = _CHOICE.fullmatch(choice)
    if match is None:
        raise EvaluationError(
            f"--checkpoint is {choice!r}; give a step, such as 4, or {' or '.join(f'{name}/4' for name in _PHASES)}"
        )
    return match[1], int(match[2])


def choice_of(folder: Path) -> str:
    """Return the value of `--checkpoint` that names a checkpoint."""
    step = folder.name.removeprefix("step-")
    return step if folder.parent.name == "train" else f"{folder.parent.name}/{step}"


def _state(folder: Path) -> dict[str, Any]:
    """Return the state of an intact checkpoint that holds a policy."""
    state = load_state(folder)
    check_fields(state, folder)
    if not (folder / _ROLE).is_dir():
        raise EvaluationError(f"{folder} holds no {_ROLE}, so there is no policy to evaluate in it")
    return state


def _folders(root: Path) -> list[Path]:
    """Return the folders of the checkpoints of one phase, the newest first."""
    return [root / f"step-{step}" for step in sorted(saved_steps(root), reverse=True)]
