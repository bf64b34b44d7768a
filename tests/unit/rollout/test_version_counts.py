"""Counts of tokens by policy version: equal to those of a loop over all tokens."""

from collections import Counter

import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.version_counts import version_columns


def test_counts_are_those_of_a_loop_over_tokens_whatever_the_order_of_versions():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 12, (200,), generator=generator).tolist()
    rows = [torch.randint(-1, 4, (size,), generator=generator, dtype=torch.int32) for size in sizes]
    rows += [torch.tensor([2**31 - 1, 0, 2**31 - 1], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)]
    columns = version_columns(Ragged.from_rows(rows, torch.int32))
    counted = [sorted(Counter(row[row >= 0].tolist()).items()) for row in rows]
    assert [[tuple(pair) for pair in row.tolist()] for row in columns["version_counts"].rows()] == counted
    assert columns["oldest_version"].tolist() == [row[0][0] if row else -1 for row in counted]
