"""Weights and optimizer state as torch's distributed checkpoint: each rank writes and reads its own part.

The files are only parts of a checkpoint: `rlpack.checkpoint.commit` hashes them before they count, and checks the
hashes before anything here opens them (the format's index is a pickle).
"""

from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rlpack.checkpoint.errors import CheckpointError


def save_training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write weights and optimizer state of all ranks into `folder`, which is new; a collective.

    The optimizer is one of `rlpack.models.optimizers.build_optimizer`, which has state from the start: torch would have
    any other take a step to get some, and saving must not change training.

    Raises:
        CheckpointError: a rank could not write, on a full disk, say.
    """
    weights, moments = get_state_dict(model, optimizer)
    try:
        state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    # It derives from BaseException, so that `except Exception` would not see it.
    except CheckpointException as error:
        raise CheckpointError(f"saving to {folder} failed, check the space left there: {_first(error)}") from error


def load_training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read what `save_training_state` wrote, on this or another number of ranks; a collective.

    Raises:
        CheckpointError: the files are not of this model.
    """
    weights, moments = get_state_dict(model, optimizer)
    try:
        state_dict_loader.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} does not fit this model, check model.*: {_first(error)}") from error
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def _first(error: CheckpointException) -> str:
    """Return the first rank's failure in one line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"
