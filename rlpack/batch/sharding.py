"""The parts of sharding, microbatches and restoring that depend on plans."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.columns import lengths_of, positions_of, same_lengths
from rlpack.batch.errors import DataError, MissingColumnError
from rlpack.batch.fields import Column
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn
from rlpack.packing import Batching, MicrobatchPlan, PackingError, RankPlan, make_plan
from rlpack.packing.analysis.layouts import Layout, packed_layout, padded_layout, shared_layout
from rlpack.packing.prefixes import owners_of, shared_tokens

Spec = Batching | Mapping[str, Any]

# What is wrong with a result whose rows have ids that nobody passed, as the end of an error message.
WITHOUT_IDS = (
    "rows without ids, so they can't be matched to its shard (a batch that repeats a row loses them); return "
    "shard.keep([]).union({...}), or pass `row_ids=shard.row_ids`"
)


def exclusive_batching(sequence_packing: Spec | None, dynamic_batching: Spec | None) -> Batching | None:
    """Return the batching that one of the two arguments requests; at most one may be set.

    >>> exclusive_batching({"max_tokens": 64}, None).mode
    'packed'

    Raises:
        DataError: both are set, or one has another mode or an unknown key.
    """
    if sequence_packing is not None and dynamic_batching is not None:
        raise DataError("sequence_packing and dynamic_batching are mutually exclusive; set one of them to None")
    for name, mode, spec in (
        ("sequence_packing", "packed", sequence_packing),
        ("dynamic_batching", "dynamic", dynamic_batching),
    ):
        if spec is None:
            continue
        batching = _batching(name, mode, spec)
        if batching.mode != mode:
            raise DataError(f"{name} has mode={batching.mode}; it must be {mode}")
        return batching
    return None


def _batching(name: str, mode: str, spec: Spec) -> Batching:
    """Return the batching of the argument `name`."""
    if isinstance(spec, Batching):
        return spec
    if not isinstance(spec, Mapping):
        raise DataError(f"{name} is a {type(spec).__name__}; pass a Batching, or a mapping with its keys")
    known = [field.name for field in fields(Batching)]
    for key in spec:
        if key not in known:
            raise DataError(f"{name} has the unknown key {key!r}; the keys are {', '.join(known)}")
    return Batching(**{"mode": mode, **spec})


def plan_by_batch_size(
    counts: np.ndarray,
    shards: int,
    batch_size: int | None,
    sequence_packing: Spec | None,
    dynamic_batching: Spec | None,
) -> MicrobatchPlan:
    """Return a plan in which every `batch_size` rows are one optimizer step over `shards` ranks.

    If neither packing nor dynamic batching is requested, a rank's rows of a step are one microbatch.

    Raises:
        PackingError: `batch_size` is not a whole number of at least 1.
    """
    if batch_size is not None and (not isinstance(batch_size, int | np.integer) or batch_size < 1):
        raise PackingError(f"batch_size is {batch_size!r}; it has to be a whole number of at least 1, or None")
    batching = exclusive_batching(sequence_packing, dynamic_batching)
    if batching is None:
        rows = max(1, -(-(batch_size or len(counts)) // max(shards, 1)))
        batching = Batching(mode="fixed", max_tokens=None, micro_batch_size=rows)
    return make_plan(counts, batching, dp_size=shards, mini_batch_size=batch_size)


def layout_of(plan: RankPlan, rows: np.ndarray, length: int) -> Layout:
    """Return the layout of a microbatch of `length` slots.

    A microbatch without rows is a dummy: its layout is as small as possible, whatever length the plan gave it. If the
    owner of a shared prompt is not among `rows`, the row that shares most of the prompt takes its place.

    Args:
        plan: the rank's plan.
        rows: the plan's rows that are present, in order, int64 [n].
        length: number of slots of the microbatch.
    """
    batching, lengths = plan.batching, plan.lengths[rows]
    if not lengths.size:
        length = min(length, max(batching.pad_to_multiple, batching.length_multiple))
    if plan.shared[rows].any():
        prefixes = np.where(plan.owners[rows] == rows, lengths, plan.shared[rows])
        # The present row with most of the prompt stores it for the others, so the prompts of all of them fit in it.
        order = np.argsort(-prefixes, kind="stable")
        owners = np.empty_like(order)
        owners[order] = order[owners_of(plan.owners[rows][order])]
        return shared_layout(lengths, shared_tokens(lengths, prefixes, owners), owners, length)
    if batching.mode == "packed":
        return packed_layout(lengths, pad_to_multiple=batching.pad_to_multiple, length=length)
    return padded_layout(lengths, length)


def check_plan(plan: MicrobatchPlan, num_rows: int, counts: np.ndarray | None, lengths_from: str) -> None:
    """Check that a plan was made for a batch of `num_rows` rows, of which row b has `counts[b]` tokens, int64 [B].

    The counts are None if the batch has no column `lengths_from`.

    Raises:
        DataError: it was made for other rows or lengths.
        MissingColumnError: it truncates rows, and there are no counts.
    """
    if plan.num_rows != num_rows:
        raise DataError(f"the plan is for {plan.num_rows} rows and the batch has {num_rows}")
    if counts is None and plan.truncated.size:
        raise MissingColumnError(
            f"the plan truncates {plan.truncated.size} of {num_rows} rows, and the batch has no column "
            f"{lengths_from!r} to cut; set lengths_from= to the column whose lengths were planned"
        )
    planned = plan.request.lengths
    if counts is not None and (differs := planned != counts).any():
        row = int(differs.argmax())
        raise DataError(
            f"the plan has {planned[row]} tokens for row {row}, which has {counts[row]}; make the plan from the "
            "batch's token_counts"
        )


def truncated_lengths(
    columns: Mapping[str, Column], plan: RankPlan, counts: np.ndarray, lengths_from: str
) -> dict[str, Tensor]:
    """Return the lengths, int64 [n], to which a plan cuts ragged columns, by column; empty if it cuts none.

    All columns with the lengths of `lengths_from` (whose `counts` are int64 [B]) are cut.
    """
    source = lengths_of(columns[lengths_from])
    if source is None or (plan.lengths == counts[plan.rows]).all():
        return {}
    lengths = {name: own for name, column in columns.items() if (own := lengths_of(column)) is not None}
    return {name: torch.from_numpy(plan.lengths) for name, own in lengths.items() if same_lengths(own, source)}


def check_results(have_ids: Sequence[bool]) -> None:
    """Raise a `DataError` unless there is a result, and each has ids of rows of the batch, or no rows.

    Ids that nobody passed are row numbers within the result, which would be taken for rows of the batch.
    """
    if not have_ids:
        raise DataError("restore needs the results of at least one rank")
    if not all(have_ids):
        raise DataError(f"result {have_ids.index(False)} has {WITHOUT_IDS}")


def restored_positions(
    row_ids: np.ndarray, ids_of_parts: Sequence[np.ndarray], plan: MicrobatchPlan | None
) -> list[np.ndarray]:
    """Return the position in the batch, int64, of each row of each part.

    Args:
        row_ids: ids of the batch's rows, int64 [B].
        ids_of_parts: ids of the rows of each rank's result.
        plan: the plan that may have dropped rows.

    Raises:
        DataError: a row is missing, occurs twice or is not from the batch; only dropped rows may be missing.
    """
    ids = np.concatenate(ids_of_parts)
    positions = positions_of(row_ids, ids)
    if (positions < 0).any():
        raise DataError(
            f"row id {ids[positions < 0][0]} is not from this batch; results must have the row_ids of their shard"
        )
    counts = np.bincount(positions, minlength=row_ids.size)
    if (counts > 1).any():
        raise DataError(f"row {int(np.flatnonzero(counts > 1)[0])} was returned {counts.max()} times")
    if plan is not None:
        counts[plan.dropped] += 1
    if not counts.all():
        missing = np.flatnonzero(counts == 0)
        hint = "" if plan else "; if a plan dropped rows, call restore(outputs, plan=plan)"
        raise DataError(f"{missing.size} of {row_ids.size} rows were not returned, the first is {missing[0]}{hint}")
    return np.split(positions, np.cumsum([part.size for part in ids_of_parts])[:-1])


def pad_truncated(
    columns: Mapping[str, Column], plan: MicrobatchPlan, positions: np.ndarray, counts: Tensor
) -> dict[str, Column]:
    """Return the columns; those with the plan's lengths are zero-padded to `counts` tokens, int64 [B].

    A column has the plan's lengths if each row at `positions` is exactly as long as in the plan.
    """
    padded = dict(columns)
    for name, column in columns.items():
        lengths = lengths_of(column)
        if lengths is None or not np.array_equal(lengths.cpu().numpy()[positions], plan.lengths[positions]):
            continue
        assert isinstance(column, Ragged | RemoteColumn)
        padded[name] = column.with_lengths(counts.to(lengths.device))
    return padded
