"""Columns that lie elsewhere: whatever is done to them gives, once they are fetched, what it does to the columns."""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.offload import offload
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import Handle
from rlpack.packing import Batching, make_plan


class InMemoryStore:
    """Parts by number; it notes which were asked for."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self.asked: list[Handle] = []

    def fetch(self, parts: Sequence[Handle]) -> Sequence[Mapping[str, Any]]:
        self.asked += parts
        return [self.parts[int(str(part))] for part in parts]

    def hold(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with all that can be put away put away, as it would be in a store."""
        found, parts = offload(batch)
        self.parts += [pickle.loads(pickle.dumps(part)) for part in parts]
        return found.with_handles(range(len(self.parts) - len(parts), len(self.parts)))

    def back(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return a batch with what was put away."""
        found = pickle.loads(pickle.dumps(batch))
        found.reader = self.fetch
        return BatchedDataDict(dict(found), row_ids=found.row_ids)


def batch_of(lengths: Sequence[int], *, first: int = 0) -> BatchedDataDict:
    tokens = Ragged(torch.arange(first, first + sum(lengths)) + 1, torch.tensor(lengths, dtype=torch.int64))
    vectors = torch.stack([tokens.values.float(), -tokens.values.float()], 1)
    texts = [f"text {first + row}" for row in range(len(lengths))]
    rows = torch.arange(len(lengths)) + first
    per_row = {"rows": rows, "wide": torch.stack([rows.half(), -rows.half()], 1)}
    columns = {"input_ids": tokens, "vectors": Ragged(vectors, tokens.lengths), "texts": texts, **per_row}
    return BatchedDataDict(columns, row_ids=np.arange(first, first + len(lengths)))


def same(found: BatchedDataDict, expected: BatchedDataDict) -> None:
    assert list(found) == list(expected)
    assert found.row_ids.tolist() == expected.row_ids.tolist()
    for name in expected:
        if isinstance(expected[name], Ragged):
            assert found[name].lengths.tolist() == expected[name].lengths.tolist()
            assert torch.equal(found[name].values, expected[name].values), name
            assert found[name].values.dtype == expected[name].values.dtype
        elif isinstance(expected[name], torch.Tensor):
            assert torch.equal(found[name], expected[name]), name
            assert found[name].dtype == expected[name].dtype
        else:
            assert list(found[name]) == list(expected[name])


lengths_of_rows = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(
    sizes=st.lists(lengths_of_rows, min_size=1, max_size=4),
    n=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_selected_repeated_and_joined_columns_are_the_same_elsewhere(sizes: list[list[int]], n: int, seed: int):
    store, random = InMemoryStore(), np.random.default_rng(seed)
    here = [batch_of(lengths, first=1000 * number) for number, lengths in enumerate(sizes)]
    there = [store.hold(part) for part in here]
    batch, remote = BatchedDataDict.concat(here), BatchedDataDict.concat(there)
    rows = random.integers(0, batch.num_rows, random.integers(0, 12))
    for change in (
        lambda b: b,
        lambda b: b.select(rows),
        lambda b: b.repeat_interleave(n),
        lambda b: b.select(rows).repeat_interleave(n).rename({"texts": "answers"}).drop(["vectors"]),
        lambda b: BatchedDataDict.concat([b.select(rows), b.select(rows[::-1])]),
    ):
        same(store.back(change(remote)), change(batch))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    ranks=st.integers(1, 4),
    overlong=st.sampled_from(["truncate", "drop", "own_microbatch"]),
    mode=st.sampled_from(["packed", "dynamic"]),
)
@settings(max_examples=60, deadline=None)
def test_shards_and_what_ranks_give_back_are_the_same_elsewhere(
    lengths: list[int], ranks: int, overlong: Any, mode: Any
):
    store, batch = InMemoryStore(), batch_of(lengths)
    remote = store.hold(batch)
    plan = make_plan(batch.token_counts(), Batching(mode=mode, max_tokens=6, overlong=overlong), dp_size=ranks)
    results, away = [], []
    for shard, elsewhere in zip(batch.shard(plan), remote.shard(plan), strict=True):
        same(store.back(elsewhere), shard)
        elsewhere.reader = store.fetch
        for step in range(shard.num_steps):
            for view, other in zip(shard.microbatches(step), elsewhere.microbatches(step), strict=True):
                same(other.rows, view.rows)
        results.append(shard.select(np.arange(shard.num_rows)[::-1]))
        away.append(store.hold(results[-1]))
    same(store.back(remote.restore(away, plan=plan)), batch.restore(results, plan=plan))


def test_only_parts_that_rows_lie_in_are_asked_for_and_only_once_read():
    store = InMemoryStore()
    parts = [store.hold(batch_of([2, 3], first=10 * number)) for number in range(3)]
    chosen = BatchedDataDict.concat(parts).select([5, 2])
    assert chosen.token_counts().tolist() == [3, 2]
    assert chosen.keep(["texts"]).num_rows == 2
    assert store.asked == []
    chosen.reader = store.fetch
    assert chosen["texts"] == ["text 21", "text 10"]
    assert chosen["texts"] == ["text 21", "text 10"]
    # The texts of batch n are part 2n + 1, its tokens 2n.
    assert store.asked == [3, 5]
    assert chosen.select([1, 1])["input_ids"].lengths.tolist() == [2, 2]
    assert store.asked == [3, 5, 2]


def test_what_lies_elsewhere_is_no_tensor_until_it_is_fetched():
    remote = InMemoryStore().hold(batch_of([2, 3]))
    for read in (lambda: remote.ragged("input_ids"), lambda: remote.padded("input_ids"), lambda: remote.to("cpu")):
        with pytest.raises(
            DataError, match=r"'input_ids' is remote: RemoteColumn\(int64, 2 rows in 1 payloads\); fetch"
        ):
            read()
    with pytest.raises(DataError, match="'input_ids' is Ragged in one batch and RemoteColumn in another"):
        BatchedDataDict.concat([remote, batch_of([1], first=50)])


def test_the_pickle_of_a_remote_batch_does_not_grow_with_its_tokens():
    sizes = []
    for scale in (1, 16):
        remote = InMemoryStore().hold(batch_of([8 * scale] * 64))
        sizes.append(len(pickle.dumps(remote)))
    assert sizes[1] <= 1.01 * sizes[0]
