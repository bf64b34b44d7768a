"""How many tokens of each row every policy version sampled, for a driver that doesn't read a version per token.

A rollout batch has two columns for it, made from `policy_version` (`rlpack.rollout.assemble`):

- `oldest_version`, int32 [B]: the lowest version of the row's sampled tokens, -1 if none was sampled;
- `version_counts`, int32 [K, 2] by row: the row's distinct versions, ascending, each with its number of tokens.
"""

import torch

from rlpack.batch.fields import Column
from rlpack.batch.ragged import Ragged

VERSION_COLUMNS = ("oldest_version", "version_counts")


def version_columns(versions: Ragged) -> dict[str, Column]:
    """Return `VERSION_COLUMNS` of rows.

    >>> columns = version_columns(Ragged.from_rows([[-1, 3, 3, 4], [-1], [5]], torch.int32))
    >>> columns["oldest_version"].tolist(), [row.tolist() for row in columns["version_counts"].rows()]
    ([3, -1, 5], [[[3, 2], [4, 1]], [], [[5, 1]]])

    Args:
        versions: the policy version of each token, int32 [T], -1 for tokens that were not sampled.
    """
    is_sampled = versions.values >= 0
    keys = (versions.segment_ids[is_sampled].long() << 32) | versions.values[is_sampled].long()
    # There are few runs, so only they are sorted.
    runs, run_lengths = torch.unique_consecutive(keys, return_counts=True)
    pairs, pair_of_run = torch.unique(runs, return_inverse=True)
    counts = torch.zeros_like(pairs).index_add_(0, pair_of_run, run_lengths)
    rows, distinct = pairs >> 32, pairs & 0xFFFFFFFF
    per_row = torch.bincount(rows, minlength=versions.num_rows)
    oldest, has_sampled = torch.full((versions.num_rows,), -1, dtype=torch.int32), per_row > 0
    oldest[has_sampled] = distinct[(per_row.cumsum(0) - per_row)[has_sampled]].int()
    return {"oldest_version": oldest, "version_counts": Ragged(torch.stack((distinct, counts), 1).int(), per_row)}
