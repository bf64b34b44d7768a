"""The batches that are drawn ahead (`rlpack.recipes.driver.ahead`), in a checkpoint.

A folder holds the list of waiting batches, and a subfolder for each batch whose rows are stored.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.batch_files import check_lists, read_batch, write_batch
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.schema import Config
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.started_batch import StartedBatch
from rlpack.safe_files import read_object

FOLDER, LIST = "ahead", "ahead.json"


def check_writable(session: Session, rollouts: BatchedDataDict) -> None:
    """Raise if a checkpoint can't hold the lists of a batch, as far as the first row of each group shows.

    Lists of the dataset are the same in all rows of a group. `write_batches` checks every row.

    Raises:
        DataError: see `check_lists`.
    """
    lists = rollouts.keep(rollouts.names_of("list"))
    if "group_ids" in rollouts:
        lists = lists.select(np.unique(rollouts["group_ids"].numpy(), return_index=True)[1])
    check_lists(session.store.fetch(lists))


def write_batches(
    session: Session, target: Path, batches: Sequence[tuple[StartedBatch, BatchedDataDict | None]]
) -> None:
    """Write batches into a new folder.

    Args:
        session: the run.
        target: the folder.
        batches: in order, each with its rows, or None if a resumed run draws it again from its position.

    Raises:
        CheckpointError: a file can't be written.
    """
    try:
        target.mkdir()
        document = {
            "policy_version": session.rollout_weights.version,
            "prompts_per_step": session.config.trainer.prompts_per_step,
            "batches": [_entry(session, target, *batch) for batch in batches],
        }
        (target / LIST).write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"the batches drawn ahead could not be written to {target}: {error}") from error


def _entry(session: Session, target: Path, started: StartedBatch, rows: BatchedDataDict | None) -> dict[str, Any]:
    """Write the rows of a batch, if given, and return its entry of the list."""
    context = started.context
    entry: dict[str, Any] = {"step": context.number, "start": started.start, "is_drawn": rows is not None}
    if rows is not None:
        write_batch(session.store.fetch(rows), target / f"step-{context.number}")
        entry |= {
            "prompts_consumed": context.progress.prompts_consumed,
            "metrics": context.metrics_of_draw(),
            "counts": {} if started.groups is None else started.groups.counts,
        }
    return entry


def read_batches(
    session: Session, folder: Path, new_batch: Callable[[int, int], StartedBatch], *, are_equal: bool
) -> Iterator[tuple[StartedBatch, dict[str, float]]]:
    """Yield the batches in a folder, in order, with their rows in the store if these were written.

    The policy version of the session's weights becomes that of the checkpoint.

    Args:
        session: the run.
        folder: the folder.
        new_batch: returns the batch of a step, given its number and the position of its first prompt.
        are_equal: whether every batch has to have `trainer.prompts_per_step` prompts.

    Yields:
        A batch, and what scoring has counted in it.

    Raises:
        CheckpointError: a file can't be read, or `trainer.prompts_per_step` has changed although it must not.
    """
    try:
        document: dict[str, Any] = read_object(folder / LIST)
        if are_equal and document["batches"]:
            check_prompts_per_step(session.config, folder, document["prompts_per_step"])
        # The first publication sends the weights that already had this number.
        session.rollout_weights.version = document["policy_version"] - 1
        for entry in document["batches"]:
            started = new_batch(entry["step"], entry["start"])
            if entry["is_drawn"]:
                started.context.advance(prompts_consumed=entry["prompts_consumed"])
                started.context.metrics |= entry["metrics"]
                rollouts = read_batch(folder / f"step-{entry['step']}")
                started.rollouts = started.context.lease.run(partial(session.store.offload, rollouts))
            yield started, entry.get("counts", {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the batches drawn ahead in {folder} can't be read: {error}; choose another run_dir"
        ) from error


def check_late_window(session: Session, folder: Path, number: int) -> None:
    """Raise if the groups of batch `number` in a checkpoint are too old for the next step.

    Raises:
        CheckpointError: `trainer.late_groups.window` is smaller than it was.
    """
    window, needed = session.config.trainer.late_groups.window, session.progress.step + 2 - number
    if window < needed:
        raise CheckpointError(
            f"trainer.late_groups.window is {window}, and the checkpoint in {folder} has groups that the next step "
            f"takes {needed - 1} steps late; resume with trainer.late_groups.window={needed} or more, or choose "
            "another run_dir"
        )


def check_prompts_per_step(config: Config, folder: Path, saved: int) -> None:
    """Raise if prompts would be trained on twice or never, because a batch doesn't begin where the one before it ends.

    Raises:
        CheckpointError: `trainer.prompts_per_step` has changed.
    """
    number = config.trainer.prompts_per_step
    if saved != number:
        raise CheckpointError(
            f"trainer.prompts_per_step is {number}, and the batches that were drawn ahead in {folder} have {saved} "
            f"prompts each; resume with trainer.prompts_per_step={saved}, or choose another run_dir"
        )
