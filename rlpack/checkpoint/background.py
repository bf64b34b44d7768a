"""Save training state while training continues (`torch.distributed.checkpoint.async_save`).

    start      copy this rank's part of weights and optimizer state; training waits only for this
    thread     write the copy, as `save_training_state` writes the state itself, and hash the files
    wait       raise if a rank could not write

The threads of all ranks communicate over a separate gloo group, so that their messages don't mix with those of
training. The copy stays allocated for the next save: touching fresh memory would take longer than copying.
"""

from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save

from rlpack.background_call import BackgroundCall
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.sharded import record_shard_hashes, save_errors
from rlpack.gloo import GLOO


class BackgroundSaver:
    """One rank's side of saves in the background, at most one at a time."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None
        self._folder = Path()
        self._save: BackgroundCall[None] | None = None

    def start(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, *, timeout_s: float
    ) -> None:
        """Copy the state and start to write it into a new directory; a collective.

        Args:
            model: see `save_training_state`.
            optimizer: see `save_training_state`.
            folder: new directory.
            timeout_s: timeout of the gloo group, in seconds; set by the first save.
        """
        assert self._save is None, "wait for the last save first"
        if self._group is None or self._stager is None:
            group = dist.new_group(backend=GLOO, timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup), "every rank is in the group"
            self._group = group
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        self._folder = folder
        save = async_save(state, checkpoint_id=folder, process_group=self._group, async_stager=self._stager)
        assert isinstance(save, Future), "only stagers that copy in the background return something else"
        self._save = BackgroundCall(partial(_finish, save, folder), name="checkpoint")

    def is_done(self) -> bool:
        """Return whether the save has succeeded or failed, without waiting."""
        return self._save is None or self._save.wait(0.0)

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have written; do nothing if no save has been started.

        Raises:
            CheckpointError: a rank could not write, or the deadline passed.
        """
        if self._save is None:
            return
        save, self._save = self._save, None
        if not save.wait(timeout_s):
            raise CheckpointError(f"saving to {self._folder} took over {timeout_s:.0f} s; is the disk slow?")
        save.outcome()


def _finish(save: Future[Any], folder: Path) -> None:
    """Wait until this rank's files are written, and hash them."""
    with save_errors(folder):
        save.result()
        record_shard_hashes(folder)
