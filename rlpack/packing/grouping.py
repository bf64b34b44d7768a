"""Split groups that no microbatch can hold, where the caller allows it."""

from dataclasses import replace

import numpy as np

from rlpack.packing.algorithms.sorting import ascending
from rlpack.packing.bins import form
from rlpack.packing.plan import Request
from rlpack.packing.rows import UNLIMITED, Rows, check_steps, resolve_rows


def split_groups(request: Request) -> tuple[Request, int]:
    """Return the request with each group over the budget as several that are not, and how many were split.

    A group is split into as few as the mode's algorithm finds; rows over the budget that get a microbatch of their
    own leave it. A group with a row that is dropped is not split: it goes as a whole.

    Raises:
        PackingError: a row is over the budget and `overlong` is error, or a group spans two optimizer steps.
    """
    assert request.groups is not None
    check_steps(request)
    rows = resolve_rows(replace(request, groups=None))
    _, group_of_row = np.unique(request.groups, return_inverse=True)
    order = ascending(group_of_row)
    bounds = np.cumsum(np.bincount(group_of_row, minlength=1))
    ids, unused = group_of_row.copy(), bounds.size
    over = np.flatnonzero(_over_budget(request, rows, group_of_row)).tolist()
    for group in over:
        members = order[bounds[group - 1] if group else 0 : bounds[group]]
        labels = _pieces(request, rows, members)
        ids[members] = np.where(labels == 0, group, unused + labels)
        unused += int(labels.max()) + 1
    return replace(request, groups=ids), len(over)


def _over_budget(request: Request, rows: Rows, group_of_row: np.ndarray) -> np.ndarray:
    """Return which groups have to be split, bool [G]."""
    batching, size = request.batching, int(group_of_row.max(initial=-1)) + 1
    budget = UNLIMITED if batching.max_tokens is None else batching.max_tokens
    counts, slots, widths, dropped = (np.zeros(size, dtype=np.int64) for _ in range(4))
    np.add.at(counts, group_of_row, 1)
    np.add.at(slots, group_of_row, rows.aligned)
    np.maximum.at(widths, group_of_row, rows.aligned)
    np.add.at(dropped, group_of_row, rows.dropped)
    needs = slots if batching.mode == "packed" else counts * widths
    too_many = (counts > batching.micro_batch_size) & (batching.mode == "fixed")
    return (counts > 1) & (dropped == 0) & ((needs > budget) | too_many)


def _pieces(request: Request, rows: Rows, members: np.ndarray) -> np.ndarray:
    """Return the piece that each row of a group belongs to, from 0, int64 [n]."""
    alone = rows.alone[members]
    labels = np.empty(members.size, dtype=np.int64)
    labels[~alone] = form(request.batching, rows.items.take(members[~alone]), request.seed)[0]
    labels[alone] = int(labels[~alone].max(initial=-1)) + 1 + np.arange(int(alone.sum()))
    return labels
