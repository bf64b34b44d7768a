"""The reference policy in the run directory: the policy that the recipe's own steps began with.

It is stored under the commit protocol. Checkpoints hold the hashes of its files, so a reference that was damaged or
replaced is detected before anything starts. It is then rebuilt if the policy that the recipe began with is still
available: in the warm-up's last checkpoint, or, without a warm-up, as the base model.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpack.checkpoint.commit import hashes_of, new_checkpoint
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.files import discard_folder
from rlpack.checkpoint.validity import fault_of
from rlpack.config.schema import Config
from rlpack.observe.run_dir import CHECKPOINTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rebuild:
    """How a damaged reference is rebuilt.

    Attributes:
        checkpoint: the warm-up's checkpoint with the policy to export; None for the base model.
        hashes: hashes of the weight files that the rebuilt reference must have.
    """

    checkpoint: Path | None
    hashes: Mapping[str, str]


def reference_model(directory: Path) -> Path:
    """Return the model folder of the reference policy."""
    return _folder(directory) / "model"


def store_reference(directory: Path, export: Callable[[str], Any]) -> dict[str, str]:
    """Store the reference in place of an earlier one, and return the hashes of its weight files.

    Args:
        directory: the run directory.
        export: writes the model into a folder.

    Raises:
        CheckpointError: it can't be written.
    """
    remove_reference(directory)
    return _store(_folder(directory), export)


def _store(folder: Path, export: Callable[[str], Any]) -> dict[str, str]:
    """Export a model into a new folder under the commit protocol, and return the hashes of its weight files."""
    with new_checkpoint(folder.parent, 0) as staging:
        export(str(staging.path / "model"))
        staging.commit({})
    return _weights(folder)


def remove_reference(directory: Path) -> None:
    """Delete the stored reference, if there is one."""
    discard_folder(_folder(directory).parent)


def check_reference(directory: Path, config: Config, hashes: Mapping[str, str]) -> Rebuild | None:
    """Return how to rebuild the reference of a resumed run; None if it is intact.

    Args:
        directory: the run directory.
        config: the run's configuration, which has the checkpoint's model and warm-up.
        hashes: hashes of the reference's weight files in the checkpoint.

    Raises:
        CheckpointError: it is damaged, and the policy that it was made from is gone.
    """
    folder = _folder(directory)
    fault = fault_of(folder)
    if fault is None and _weights(folder) != hashes:
        fault = "it isn't the policy that the run began with"
    if fault is None and len(hashes) < len(list(reference_model(directory).glob("*.safetensors"))):
        fault = "it has more weight files than were written"
    if fault is None:
        return None
    warmup = config.sft_warmup.steps
    checkpoint = directory / CHECKPOINTS / "sft_warmup" / f"step-{warmup}" if warmup else None
    if checkpoint is not None and (gone := fault_of(checkpoint)) is not None:
        raise CheckpointError(
            f"the reference {folder} can't be loaded: {fault}; nor can {checkpoint}, which it could be rebuilt from: "
            f"{gone}; restore the files of either, set algorithm.kl_coef=0, or choose another run_dir"
        )
    own = "the new model of model.config" if config.model.path is None else f"model.path={config.model.path}"
    source = checkpoint or own
    logger.warning("the reference %s can't be loaded: %s; rebuilding it from %s", folder, fault, source)
    return Rebuild(checkpoint, hashes)


def rebuild_reference(directory: Path, rebuild: Rebuild, export: Callable[[str], Any]) -> None:
    """Store the reference again, bit for bit, in place of the damaged one.

    Raises:
        CheckpointError: it isn't the policy that the run began with. What is stored stays as it is.
    """
    folder = _folder(directory)
    rebuilt = folder.parent.with_name(".rebuilt")
    discard_folder(rebuilt)  # of a rebuild that was killed
    try:
        if _store(rebuilt / folder.name, export) != rebuild.hashes:
            raise CheckpointError(
                f"the reference {folder} can't be rebuilt, because the base model isn't the one that the run began "
                "with; restore the reference's files, set algorithm.kl_coef=0, or choose another run_dir"
            )
        remove_reference(directory)
        rebuilt.rename(folder.parent)
    except OSError as error:
        raise CheckpointError(f"the reference {folder} can't be replaced by the rebuilt one: {error}") from error
    finally:
        discard_folder(rebuilt)


def _weights(folder: Path) -> dict[str, str]:
    """Return the hashes of the weight files; the others may depend on the versions of libraries."""
    return {name: digest for name, digest in hashes_of(folder).items() if name.endswith(".safetensors")}


def _folder(directory: Path) -> Path:
    return directory / CHECKPOINTS / "reference" / "step-0"
