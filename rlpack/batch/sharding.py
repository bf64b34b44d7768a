"""From a container's arguments to a plan, and from a plan's microbatch to a layout."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.columns import lengths_of, same_lengths
from rlpack.batch.errors import DataError
from rlpack.batch.fields import Column
from rlpack.packing import Batching, MicrobatchPlan, RankPlan, make_plan
from rlpack.packing.analysis.layouts import Layout, packed_layout, padded_layout

Spec = Batching | Mapping[str, Any]


def exclusive_batching(sequence_packing: Spec | None, dynamic_batching: Spec | None) -> Batching | None:
    """Return the batching that two arguments of which at most one is given ask for.

    >>> exclusive_batching({"max_tokens": 64}, None).mode
    'packed'

    Raises:
        DataError: both are given, or one asks for another mode or has a key that there is none of.
    """
    if sequence_packing is not None and dynamic_batching is not None:
        raise DataError("sequence_packing and dynamic_batching exclude each other; give one, set the other to None")
    for name, mode, spec in (
        ("sequence_packing", "packed", sequence_packing),
        ("dynamic_batching", "dynamic", dynamic_batching),
    ):
        if spec is None:
            continue
        batching = _batching(name, mode, spec)
        if batching.mode != mode:
            raise DataError(f"{name} has mode={batching.mode}; it has to be {mode}")
        return batching
    return None


def _batching(name: str, mode: str, spec: Spec) -> Batching:
    """Return the batching that the argument `name` asks for."""
    if isinstance(spec, Batching):
        return spec
    if not isinstance(spec, Mapping):
        raise DataError(f"{name} is a {type(spec).__name__}; give a Batching, or a mapping with its keys")
    known = [field.name for field in fields(Batching)]
    for key in spec:
        if key not in known:
            raise DataError(f"{name} has the key {key!r}; the keys are {', '.join(known)}")
    return Batching(**{"mode": mode, **spec})


def plan_by_batch_size(
    counts: np.ndarray,
    shards: int,
    batch_size: int | None,
    sequence_packing: Spec | None,
    dynamic_batching: Spec | None,
) -> MicrobatchPlan:
    """Return the plan in which every `batch_size` rows are one optimizer step over `shards` ranks.

    Without packing and dynamic batching, a rank's rows of a step are one microbatch.
    """
    batching = exclusive_batching(sequence_packing, dynamic_batching)
    if batching is None:
        rows = max(1, -(-(batch_size or len(counts)) // max(shards, 1)))
        batching = Batching(mode="fixed", max_tokens=None, micro_batch_size=rows)
    return make_plan(counts, batching, dp_size=shards, mini_batch_size=batch_size)


def layout_of(batching: Batching, lengths: np.ndarray, length: int) -> Layout:
    """Return where the tokens of a microbatch of `length` slots go, rows of `lengths` tokens in order.

    Without a row it is a filler, and as small as fillers are, however large the plan had it.
    """
    if not lengths.size:
        length = min(length, max(batching.pad_to_multiple, batching.length_multiple))
    if batching.mode == "packed":
        return packed_layout(lengths, pad_to_multiple=batching.pad_to_multiple, length=length)
    return padded_layout(lengths, length)


def shortened(
    columns: Mapping[str, Column], plan: RankPlan, counts: np.ndarray, lengths_from: str
) -> dict[str, Tensor]:
    """Return the lengths (int64 [n]) that a rank's plan cuts ragged columns to; nothing where it cuts none.

    Every column that is as long as `lengths_from` (whose `counts` are int64 [B]) is cut with it.

    Raises:
        DataError: a row has fewer tokens than the plan says.
    """
    longer = plan.lengths > counts[plan.rows]
    if longer.any():
        row = int(plan.rows[longer][0])
        raise DataError(f"the plan has {int(plan.lengths[longer][0])} tokens for row {row}, which has {counts[row]}")
    source = lengths_of(columns[lengths_from])
    if source is None or (plan.lengths == counts[plan.rows]).all():
        return {}
    lengths = {name: found for name, column in columns.items() if (found := lengths_of(column)) is not None}
    return {name: torch.from_numpy(plan.lengths) for name, found in lengths.items() if same_lengths(found, source)}


def check_restored(ids: np.ndarray, positions: np.ndarray, num_rows: int, plan: MicrobatchPlan | None) -> None:
    """Raise a `DataError` unless every row came back once; those that the plan dropped need not.

    Row `ids[i]` came back, and stands at `positions[i]` of the batch (-1: it is of another batch).
    """
    if (positions < 0).any():
        raise DataError(f"row id {ids[positions < 0][0]} is not of this batch; results carry their shard's row_ids")
    counts = np.bincount(positions, minlength=num_rows)
    if (counts > 1).any():
        raise DataError(f"row {int(np.flatnonzero(counts > 1)[0])} came back {counts.max()} times")
    if plan is not None:
        counts[plan.dropped] += 1
    if not counts.all():
        missing = np.flatnonzero(counts == 0)
        hint = "" if plan else "; where a plan dropped rows, give restore(outputs, plan=plan)"
        raise DataError(f"{missing.size} of {num_rows} rows did not come back, the first is {missing[0]}{hint}")
