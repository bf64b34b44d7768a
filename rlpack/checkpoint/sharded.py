"""Weights and optimizer state in torch's distributed checkpoint format: each rank writes and reads its own part.

The files are part of a checkpoint of `rlpack.checkpoint.commit`, which has the hashes of all files and verifies them
before this module opens one. Hashes don't protect against a maliciously crafted folder, so files are read by
`rlpack.checkpoint.restricted`, which runs no code from them.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.rank_hashes import record_hashes
from rlpack.checkpoint.restricted import RestrictedPlanner, RestrictedReader


def save_training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write weights and optimizer state into a new directory; a collective.

    The optimizer comes from `rlpack.models.optimizers.build_optimizer`, which initializes the state at once. For an
    optimizer without state, torch would take a step to create it, and saving must not change training.

    Raises:
        CheckpointError: a rank could not write, because the disk is full, for example.
    """
    weights, moments = get_state_dict(model, optimizer)
    with save_errors(folder):
        state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        record_shard_hashes(folder)


def record_shard_hashes(folder: Path) -> None:
    """Hash the files that `torch.distributed.checkpoint` wrote into a folder for this rank.

    Raises:
        OSError: see `record_hashes`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    record_hashes(folder, rank, sorted(path.name for path in folder.glob(f"__{rank}_*.distcp")))


@contextmanager
def save_errors(folder: Path) -> Iterator[None]:
    """Raise the errors of a save as a `CheckpointError`."""
    try:
        yield
    # CheckpointException derives from BaseException, so `except Exception` would miss it.
    except (CheckpointException, OSError) as error:
        cause = _first(error) if isinstance(error, CheckpointException) else str(error)
        raise CheckpointError(f"saving to {folder} failed; check the free disk space: {cause}") from error


def load_training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load the state that `save_training_state` wrote, on any number of ranks; a collective.

    The settings of the optimizer's groups, such as its learning rate, stay as they are.

    Raises:
        CheckpointError: the files belong to another model, or contain classes that no checkpoint of weights needs.
    """
    reader = RestrictedReader(folder)
    weights, moments = get_state_dict(model, optimizer)
    # The groups list the weights of the rank that saved them, and may have another learning rate.
    state = {"model": weights, "optimizer": {"state": moments["state"]}}
    with _typed_errors(folder):
        state_dict_loader.load(state, storage_reader=reader, planner=RestrictedPlanner())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load only the weights that `save_training_state` wrote on any number of ranks; not a collective.

    Args:
        model: the model, not sharded.
        folder: the role's folder in a checkpoint.

    Raises:
        CheckpointError: see `load_training_state`.
    """
    reader = RestrictedReader(folder)
    weights = get_model_state_dict(model)
    with _typed_errors(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        state_dict_loader.load({"model": weights}, storage_reader=reader, planner=RestrictedPlanner(), no_dist=True)
    set_model_state_dict(model, weights)


@contextmanager
def _typed_errors(folder: Path) -> Iterator[None]:
    """Raise the errors of torch's loader as a `CheckpointError`."""
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CheckpointError):
                raise cause from error
        raise CheckpointError(f"{folder} does not fit this model; check model.*: {_first(error)}") from error


def _first(error: CheckpointException) -> str:
    """Describe the first failed rank's error in one line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"
