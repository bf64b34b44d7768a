"""Prompts that several rows of a microbatch have in common, computed only once.

Causal attention gives the tokens of a prompt the same hidden states in every row that begins with it. The first row
of a group in a microbatch, the owner, holds the prompt; the other rows have slots only for their remaining tokens,
which attend to the owner's. Outputs and gradients are those of whole rows, up to rounding.

Invariants:

1. The owner is the first row, in the microbatch, of the parts of the group whose first rows have equal prefixes. It
   shares nothing.
2. No row shares more tokens than the owner has, or than it has itself.

`tests/unit/packing/test_prefixes.py` asserts them.
"""

import numpy as np

from rlpack.packing.algorithms.sorting import by_first_row

# Groups are divided until an optimizer step has this many items per microbatch: fewer can't be balanced.
_ITEMS_PER_MICROBATCH = 4


def owners_of(item: np.ndarray) -> np.ndarray:
    """Return the first row of each row's item, int64 [B].

    >>> owners_of(np.array([7, 7, 3, 7])).tolist()
    [0, 0, 2, 0]
    """
    _, first, inverse = np.unique(item, return_index=True, return_inverse=True)
    return first[inverse]


def owners_in_microbatches(microbatch: np.ndarray, prompts: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
    """Return the row that holds each row's prompt, int64 [B].

    Parts of a group that are in one microbatch have one owner if their first rows have equal prefixes. A shorter prefix
    would make the rows of another part share fewer tokens than planned, and the microbatch exceed its budget.

    >>> owners_in_microbatches(np.array([1, 1, 0, 1]), np.array([5, 5, 5, 5]), np.array([3, 3, 3, 2])).tolist()
    [0, 0, 2, 3]

    Args:
        microbatch: microbatch of each row, int64 [B].
        prompts: id of each row's prompt, int64 [B].
        prefixes: prefix of the first row of each row's part, int64 [B].
    """
    kind = by_first_row(by_first_row(prompts) * (prefixes.max(initial=0) + 1) + prefixes)
    return owners_of(microbatch * kind.size + kind)


def shared_tokens(lengths: np.ndarray, prefixes: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return the leading tokens of each row that its owner holds, int64 [B]; 0 for the owners.

    >>> shared_tokens(np.array([5, 4, 3]), np.array([3, 3, 3]), np.array([0, 0, 2])).tolist()
    [0, 3, 0]

    Args:
        lengths: tokens of each row, int64 [B].
        prefixes: leading tokens that all rows of its group have in common, int64 [B].
        owners: the row that holds them, int64 [B].
    """
    common = np.minimum(np.minimum(prefixes, prefixes[owners]), np.minimum(lengths, lengths[owners]))
    return np.where(owners == np.arange(owners.size), 0, common)


def sharing_groups(groups: np.ndarray, *, rows_per_step: int, num_microbatches: int) -> np.ndarray:
    """Divide groups that span optimizer steps or are too few to balance; return new group ids, int64 [B].

    Rows of a prompt that are in two optimizer steps can't share it. If a step has few prompts for its number of
    microbatches, their rows are divided into equal runs.

    >>> sharing_groups(np.array([7, 7, 7, 7]), rows_per_step=4, num_microbatches=1).tolist()
    [0, 1, 2, 3]
    >>> sharing_groups(np.repeat(np.arange(4), 2), rows_per_step=4, num_microbatches=1).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> sharing_groups(np.repeat(np.arange(4), 2), rows_per_step=8, num_microbatches=1).tolist()
    [0, 0, 1, 1, 2, 2, 3, 3]

    Args:
        groups: id of each row's prompt, int64 [B].
        rows_per_step: rows of an optimizer step, in arrival order.
        num_microbatches: minimum number of microbatches of an optimizer step, over all ranks.
    """
    pieces = np.zeros_like(groups)
    next_id = 0
    for start in range(0, groups.size, rows_per_step):
        step = slice(start, start + rows_per_step)
        item = by_first_row(groups[step])
        counts = np.bincount(item)
        num_parts = min(num_microbatches * _ITEMS_PER_MICROBATCH, item.size)
        parts = -(-counts * num_parts // item.size)
        order = np.argsort(item, kind="stable")
        within = np.empty_like(item)
        within[order] = np.arange(item.size) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.cumsum(parts) - parts
        pieces[step] = next_id + first[item] + within * parts[item] // counts[item]
        next_id += int(parts.sum())
    return pieces
