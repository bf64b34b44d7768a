"""Resuming: find the checkpoint to continue from, and refuse one whose datasets have changed."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlpack.batch.errors import DataError
from rlpack.checkpoint.commit import load_state, newest, newest_damage
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.restricted import INDEX, read_index
from rlpack.config.schema import Config
from rlpack.data.prompts import Prompts
from rlpack.data.tools import COLUMN as TOOLS
from rlpack.recipes.driver.progress import Progress
from rlpack.startup.same_run import check_fields, check_same_run, check_steps, other_fields


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A committed checkpoint whose files are verified, and its state."""

    path: Path
    state: dict[str, Any]

    @property
    def progress(self) -> Progress:
        """Return how far the run had come."""
        return Progress(**self.state["progress"])

    def progress_with(self, config: Config) -> Progress:
        """Return the progress with which a run of this configuration continues.

        If it has another `algorithm.kl_coef` than the checkpoint's, the coefficient is adapted from that value on.
        """
        was = self.state["config"]["algorithm"].get("kl_coef")
        return self.progress if was == config.algorithm.kl_coef else replace(self.progress, kl_coef=None)

    def evaluation_is_due(self, config: Config, *, is_logged: bool) -> bool:
        """Return whether a run with this configuration has to evaluate after the checkpoint's step.

        The evaluation was due when the checkpoint was written, and has not ended since; or the step is the last one now
        and wasn't then, and the run has not evaluated after it, or has left out the sets that are evaluated at the end.

        Args:
            config: the configuration.
            is_logged: the run has a record of an evaluation after this step.
        """
        step, saved = self.progress.step, self.state["config"]
        was_last, is_last = (step == total for total in (saved["trainer"].get("steps"), config.trainer.steps))
        has_become_last = self.progress.phase == "train" and is_last and not was_last
        has_sets_of_end = any(one.at_end for one in config.evaluation.sets.values())
        was_left_out = has_sets_of_end or step % saved["evaluation"].get("every", 1) != 0
        was_due = bool(self.state.get("evaluation_is_due"))
        return (was_due and not is_logged) or (has_become_last and was_left_out)

    def check_fields(self) -> None:
        """Check that the state has the fields that this version writes, which its format promises.

        Raises:
            CheckpointError: fields are missing or unknown, or have values of other types.
        """
        check_fields(self.state, self.path)
        progress = self.state["progress"]
        counts = [value for name, value in progress.items() if name not in ("phase", "kl_coef")]
        coefficient = progress.get("kl_coef")
        if (
            progress.keys() != {field.name for field in fields(Progress)}
            or not all(type(count) is int and count >= 0 for count in counts)
            or not (coefficient is None or type(coefficient) in (int, float))
            or not isinstance(self.state["records"], dict)
            or not isinstance(self.state["reference"], dict | None)
            or not isinstance(self.state.get("evaluation_is_due", False), bool)
        ):
            raise other_fields(self.state, self.path)


def checkpoint_to_resume(directory: Path, config: Config) -> LoadedCheckpoint | None:
    """Return the checkpoint from which a run continues, None for a run that starts over.

    Raises:
        CheckpointError: see `newest_checkpoint`.
        ConfigError: the checkpoint belongs to another run; see `check_same_run` and `check_steps`.
    """
    loaded = newest_checkpoint(directory) if config.resume == "auto" else None
    if loaded is not None:
        has_reference = not loaded.progress.recipe_started or loaded.state["reference"] is not None
        check_same_run(loaded.state["config"], config, has_reference=has_reference)
        check_steps(loaded.state["progress"], config)
    return loaded


def newest_checkpoint(directory: Path) -> LoadedCheckpoint | None:
    """Return the newest intact checkpoint of a run directory.

    The recipe's checkpoints are newer than the warm-up's.

    Raises:
        CheckpointError: all checkpoints of the recipe, or of a warm-up without any, are damaged, and starting that
            phase over would overwrite what is left of them; or the newest was written by another version, or contains
            classes that could run code.
    """
    for phase in ("train", "sft_warmup"):
        root = directory / "checkpoints" / phase
        path = newest(root)
        if path is not None:
            checkpoint = LoadedCheckpoint(path, load_state(path))
            checkpoint.check_fields()
            for index in path.glob(f"*/{INDEX}"):
                read_index(index.parent)  # ranks read it in the same way, but only after they have started
            return checkpoint
        if (damage := newest_damage(root)) is not None:
            folder, fault = damage
            raise CheckpointError(
                f"no checkpoint of run_dir={directory} can be loaded; the newest, {folder}, is damaged: {fault}; "
                "restore its files, or choose another run_dir to start over"
            )
    return None


def check_same_prompts(checkpoint: LoadedCheckpoint, config: Config, prompts: Prompts, held_out: Prompts) -> None:
    """Refuse to resume over changed datasets, in which the run's position would refer to other prompts.

    Raises:
        DataError: a file or dataset has changed since the checkpoint was written, or a tokenizer of characters is built
            from other `evaluation.sets`.
    """
    data, sets = config.data, config.model_dump(mode="json")["evaluation"]["sets"]
    from_characters = config.model.path is None and config.model.tokenizer is None
    has_other_sets = from_characters and checkpoint.state["config"]["evaluation"].get("sets", {}) != sets
    sources = {"prompts": (prompts, data.source), "held_out": (held_out, data.validation_source or data.source)}
    for name, (split, source) in sources.items():
        if not split.has_fingerprint(checkpoint.state[name]):
            if has_other_sets:
                raise DataError(
                    f"the tokenizer has other characters than when the checkpoint {checkpoint.path} was written: it is "
                    "built from the characters of all prompts, and evaluation.sets has changed; restore the sets, or "
                    "choose another run_dir"
                )
            raise DataError(
                f"{source} has other rows than when the checkpoint {checkpoint.path} was written"
                f"{_other_causes(config, split)}; restore them, or choose another run_dir"
            )


def _other_causes(config: Config, split: Prompts) -> str:
    """Return why prompts that a chat template renders may differ from those of a checkpoint, though no row does."""
    if split.dated_by is not None:
        return ", or its chat template or tokenizer has changed, or an earlier version wrote it on another day"
    if config.data.chat_template and TOOLS in split.column_names:
        return f", or an earlier version wrote it, which left the column {TOOLS} out of the prompts"
    return ""


def resumed_note(progress: Progress, steps: int, checkpoint: Path) -> str:
    """Return what a run says as it continues from a checkpoint.

    >>> resumed_note(Progress(phase="train", step=2), 3, Path("runs/a"))
    'resumed after step 2 of train from runs/a'
    >>> resumed_note(Progress(phase="train", step=3), 3, Path("runs/a"))
    'resumed after step 3 of train from runs/a; trainer.steps is 3, so no step is left: raise it to train further'
    """
    text = f"resumed after step {progress.step} of {progress.phase} from {checkpoint}"
    if progress.phase == "train" and progress.step >= steps:
        text += f"; trainer.steps is {steps}, so no step is left: raise it to train further"
    return text
