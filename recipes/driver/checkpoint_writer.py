"""Write a session's checkpoints, synchronously or while training continues.

    start     ranks copy their state, and write the copy in threads; training waits for the copy
    advance   at each step's end: once all ranks are done, a thread of the driver flushes, renames and marks
    finish    wait for both, at the latest before the next checkpoint and at the end of a phase

Invariants (tests/unit/recipes/driver/test_checkpoint_writer.py):
1. At most one checkpoint is in flight.
2. A checkpoint is committed only after all roles have written it. Its state is that of the step that started it.
3. The next `advance` or `finish` raises the error of a failed save; the previous checkpoint stays.
4. A folder is never deleted while its commit runs.
5. Once another process has taken over the run directory, no checkpoint is started or committed.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlpack.background_call import BackgroundCall
from rlpack.checkpoint.commit import Staging, new_checkpoint
from rlpack.checkpoint.errors import CheckpointError
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.worker import Trainable

logger = logging.getLogger(__name__)

Groups = Mapping[str, WorkerGroup[Any]]

# Ranks stop waiting for their files a little before the driver stops waiting for their answer: their error names the
# folder.
_SHARE_OF_CALL = 0.9


@dataclass
class _InFlight:
    """A checkpoint that is being written.

    Attributes:
        stack: deletes the staging directory unless it is committed.
        staging: where ranks write.
        groups: the roles that write.
        state: the driver's state at the step.
        commit: the driver's commit, which starts once all roles have written.
    """

    stack: ExitStack
    staging: Staging
    groups: Groups
    state: dict[str, Any]
    commit: BackgroundCall[Any] | None = None


def _role_folder(staging: Staging, role: str) -> str:
    """Create the folder that a role's ranks write into, and return its path: ranks that create it would race."""
    folder = staging.path / role
    try:
        folder.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"the folder of role {role}, {folder}, can't be created: {error}; check the disk and the permissions of "
            "run_dir"
        ) from error
    return str(folder)


class CheckpointWriter:
    """Writes checkpoints, at most one at a time."""

    def __init__(self, *, keep: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Set the limits.

        Args:
            keep: number of committed checkpoints to keep.
            timeout_s: deadline of a call of a rank, and of a commit, in seconds.
            check: raises if the run directory is another process's by now; called before a checkpoint is started, and,
                in the thread that commits it, before it is renamed.
        """
        self._keep = keep
        self._timeout_s = timeout_s
        self._check = check
        self._in_flight: _InFlight | None = None

    def save(
        self, root: Path, step: int, groups: Groups, state: dict[str, Any], write: Callable[[Path], None] | None = None
    ) -> None:
        """Write and commit a checkpoint; delete older ones.

        Args:
            root: directory of the phase's checkpoints.
            step: step of the checkpoint.
            groups: the trained roles by name.
            state: the driver's state, as JSON values.
            write: writes further files of the driver into the folder that it gets.

        Raises:
            CheckpointError: this checkpoint, or the one in flight, could not be written.
            RunTakenOverError: the run directory is another process's.
        """
        self.finish()
        self._check()
        with new_checkpoint(root, step, keep=self._keep) as staging:
            for name, group in groups.items():
                group.run(Trainable.save, _role_folder(staging, name))
            if write is not None:
                write(staging.path)
            staging.commit(state, keep=self._keep, check=self._check)

    def start(
        self, root: Path, step: int, groups: Groups, state: dict[str, Any], write: Callable[[Path], None] | None = None
    ) -> None:
        """Finish the checkpoint in flight, and start another; arguments and errors are those of `save`."""
        self.finish()
        self._check()
        with ExitStack() as stack:
            staging = stack.enter_context(new_checkpoint(root, step, keep=self._keep))
            started: list[WorkerGroup[Any]] = []
            try:
                for name, group in groups.items():
                    folder = _role_folder(staging, name)
                    started.append(group)
                    group.run(Trainable.start_save, folder, self._timeout_s)
                if write is not None:
                    write(staging.path)
            except Exception:
                with suppress(Exception):
                    self._finish_saves(started)
                raise
            self._in_flight = _InFlight(stack.pop_all(), staging, groups, state)

    def advance(self) -> None:
        """Advance the checkpoint in flight as far as possible without waiting.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._in_flight is None:
            return
        if self._in_flight.commit is not None:
            if self._in_flight.commit.wait(0.0):
                self.finish()
        elif all(group.run(Trainable.save_is_done) for group in self._in_flight.groups.values()):
            try:
                self._start_commit(self._in_flight)
            except BaseException:
                self.abandon()  # it is incomplete
                raise

    def finish(self) -> None:
        """Wait until the checkpoint in flight is committed; do nothing if there is none.

        Raises:
            CheckpointError: it could not be written.
        """
        checkpoint = self._in_flight
        if checkpoint is None:
            return
        try:
            commit = checkpoint.commit or self._start_commit(checkpoint)
            if not commit.wait(self._timeout_s):
                raise CheckpointError(
                    f"the checkpoint in {checkpoint.staging.path} was not committed in {self._timeout_s:.0f} s; is the "
                    "disk slow? placement.call_timeout_s is the limit"
                )
            commit.outcome()
        finally:
            self._forget()

    def finish_after_error(self) -> None:
        """Commit the checkpoint in flight if its roles still answer, because the run is ending with an error.

        The error may have nothing to do with the trained roles: their state of an earlier step is not lost with it. A
        failure is only a warning.
        """
        if self._in_flight is not None:
            logger.warning(
                "the run is ending; waiting for the checkpoint under way in %s", self._in_flight.staging.path
            )
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - the run ends with its own error
            logger.warning("the checkpoint under way could not be committed: %s", error)

    def abandon(self) -> None:
        """Delete the checkpoint in flight without waiting for ranks, because the run is stopping at once.

        Once all ranks have written, only the driver's commit is left, and is waited for.
        """
        if self._in_flight is not None and self._in_flight.commit is not None:
            self.finish_after_error()
        else:
            self._forget()

    def discard(self) -> None:
        """Delete the checkpoint in flight without waiting, because another process has taken over the run directory.

        A commit that still runs ends with an error before it renames the checkpoint.
        """
        self._forget()

    def _forget(self) -> None:
        """Delete the staging directory, unless it is committed or a commit still runs: the next save deletes it."""
        checkpoint, self._in_flight = self._in_flight, None
        if checkpoint is not None and (checkpoint.commit is None or checkpoint.commit.wait(0.0)):
            checkpoint.stack.close()

    def _start_commit(self, checkpoint: _InFlight) -> BackgroundCall[Any]:
        """Wait until all roles have written, and commit in a thread."""
        self._finish_saves(checkpoint.groups.values())
        # Unlike an executor's threads, this one lets a command that has given up waiting exit.
        checkpoint.commit = BackgroundCall(partial(self._commit, checkpoint), name="checkpoint")
        return checkpoint.commit

    def _finish_saves(self, groups: Iterable[WorkerGroup[Any]]) -> None:
        """Wait for the saves of all groups, even after an error: ranks with an unfinished save can't start another."""
        with ExitStack() as stack:
            for group in groups:
                stack.callback(group.run, Trainable.finish_save, _SHARE_OF_CALL * self._timeout_s)

    def _commit(self, checkpoint: _InFlight) -> None:
        """Commit; the thread's reference to the checkpoint keeps its stack from being collected, and so closed."""
        checkpoint.staging.commit(checkpoint.state, keep=self._keep, check=self._check)
