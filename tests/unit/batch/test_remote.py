"""Remote columns: any operation on them gives, once fetched, the result of the operation on the columns themselves."""

import pickle
from collections.abc import Callable, Mapping, Sequence
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
from rlpack.batch.remote import Handle, RemoteColumn, rows_by_place
from rlpack.packing import Batching, make_plan


class InMemoryStore:
    """Payloads by number; records which were read."""

    def __init__(self) -> None:
        self.payloads: list[dict[str, Any]] = []
        self.read: list[Handle] = []

    def read_payloads(self, handles: Sequence[Handle]) -> Sequence[Mapping[str, Any]]:
        self.read += handles
        return [self.payloads[int(str(handle))] for handle in handles]

    def offload(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with its payloads in this store."""
        offloaded, payloads = offload(batch)
        self.payloads += [pickle.loads(pickle.dumps(payload)) for payload in payloads]
        return offloaded.with_handles(range(len(self.payloads) - len(payloads), len(self.payloads)))

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with its columns fetched."""
        received = pickle.loads(pickle.dumps(batch))
        received.reader = self.read_payloads
        return BatchedDataDict(dict(received), row_ids=received.row_ids)


def batch_of(lengths: Sequence[int], *, first: int = 0) -> BatchedDataDict:
    tokens = Ragged(torch.arange(first, first + sum(lengths)) + 1, torch.tensor(lengths, dtype=torch.int64))
    vectors = torch.stack([tokens.values.float(), -tokens.values.float()], 1)
    texts = [f"text {first + row}" for row in range(len(lengths))]
    rows = torch.arange(len(lengths)) + first
    per_row = {"rows": rows, "wide": torch.stack([rows.half(), -rows.half()], 1)}
    columns = {"input_ids": tokens, "vectors": Ragged(vectors, tokens.lengths), "texts": texts, **per_row}
    return BatchedDataDict(columns, row_ids=np.arange(first, first + len(lengths)))


def assert_same(result: BatchedDataDict, expected: BatchedDataDict) -> None:
    assert list(result) == list(expected)
    assert result.row_ids.tolist() == expected.row_ids.tolist()
    for name in expected:
        if isinstance(expected[name], Ragged):
            assert result[name].lengths.tolist() == expected[name].lengths.tolist()
            assert torch.equal(result[name].values, expected[name].values), name
            assert result[name].values.dtype == expected[name].values.dtype
        elif isinstance(expected[name], torch.Tensor):
            assert torch.equal(result[name], expected[name]), name
            assert result[name].dtype == expected[name].dtype
        else:
            assert list(result[name]) == list(expected[name])


lengths_of_rows = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(
    sizes=st.lists(lengths_of_rows, min_size=1, max_size=4),
    n=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_selected_repeated_and_joined_remote_columns_equal_local_ones(sizes: list[list[int]], n: int, seed: int):
    store, random = InMemoryStore(), np.random.default_rng(seed)
    local = [batch_of(lengths, first=1000 * number) for number, lengths in enumerate(sizes)]
    remote_parts = [store.offload(part) for part in local]
    batch, remote = BatchedDataDict.concat(local), BatchedDataDict.concat(remote_parts)
    rows = random.integers(0, batch.num_rows, random.integers(0, 12))
    for change in (
        lambda b: b,
        lambda b: b.select(rows),
        lambda b: b.repeat_interleave(n),
        lambda b: b.select(rows).repeat_interleave(n).rename({"texts": "answers"}).drop(["vectors"]),
        lambda b: BatchedDataDict.concat([b.select(rows), b.select(rows[::-1])]),
    ):
        assert_same(store.fetch(change(remote)), change(batch))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    ranks=st.integers(1, 4),
    overlong=st.sampled_from(["truncate", "drop", "own_microbatch"]),
    mode=st.sampled_from(["packed", "dynamic"]),
)
@settings(max_examples=60, deadline=None)
def test_remote_shards_and_results_equal_local_ones(lengths: list[int], ranks: int, overlong: Any, mode: Any):
    store, batch = InMemoryStore(), batch_of(lengths)
    remote = store.offload(batch)
    plan = make_plan(batch.token_counts(), Batching(mode=mode, max_tokens=6, overlong=overlong), dp_size=ranks)
    results, remote_results = [], []
    for shard, remote_shard in zip(batch.shard(plan), remote.shard(plan), strict=True):
        assert_same(store.fetch(remote_shard), shard)
        remote_shard.reader = store.read_payloads
        for step in range(shard.num_steps):
            for view, other in zip(shard.microbatches(step), remote_shard.microbatches(step), strict=True):
                assert_same(other.rows, view.rows)
        results.append(shard.select(np.arange(shard.num_rows)[::-1]))
        remote_results.append(store.offload(results[-1]))
    assert_same(store.fetch(remote.restore(remote_results, plan=plan)), batch.restore(results, plan=plan))


def test_only_payloads_of_selected_rows_are_read_and_only_on_access():
    store = InMemoryStore()
    parts = [store.offload(batch_of([2, 3], first=10 * number)) for number in range(3)]
    chosen = BatchedDataDict.concat(parts).select([5, 2])
    assert chosen.token_counts().tolist() == [3, 2]
    assert chosen.keep(["texts"]).num_rows == 2
    assert store.read == []
    chosen.reader = store.read_payloads
    assert chosen["texts"] == ["text 21", "text 10"]
    assert chosen["texts"] == ["text 21", "text 10"]
    # The tokens of batch n are payload 2n, its texts payload 2n + 1.
    assert store.read == [3, 5]
    assert chosen.select([1, 1])["input_ids"].lengths.tolist() == [2, 2]
    assert store.read == [3, 5, 2]


def test_remote_columns_are_not_tensors_until_they_are_fetched():
    remote = InMemoryStore().offload(batch_of([2, 3]))
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
        remote = InMemoryStore().offload(batch_of([8 * scale] * 64))
        sizes.append(len(pickle.dumps(remote)))
    assert sizes[1] <= 1.01 * sizes[0]


def test_a_recipe_that_computes_with_a_column_of_the_ranks_gets_an_error_that_says_what_to_do():
    rows = BatchedDataDict({"input_ids": Ragged.from_rows([[1], [2]], torch.int64), "is_revised": [True, False]})
    batch = InMemoryStore().offload(rows.union({"note": ["a" * 1000, "b"]}))
    said = (
        r"column note is a list and stays on the ranks.*; return a tensor with one value per row from the role instead"
    )
    with pytest.raises(AttributeError, match=rf"^\.float: the {said}$"):
        batch["note"].float()
    uses: list[Callable[[Any], Any]] = [lambda column: column[0], list, sum, lambda column: torch.ones(2) * column]
    uses += [lambda column: 2 * column, lambda column: column == "b", lambda column: column > 0, lambda column: ~column]
    for use in uses:
        with pytest.raises(TypeError, match=said):
            use(batch["note"])
    assert getattr(batch["note"], "float", None) is None
    with pytest.raises(AttributeError, match=r"input_ids has several values per row .*; compute with it in a role"):
        _ = batch["input_ids"].values


def test_the_rows_that_columns_read_are_returned_once_for_each_payload_and_name():
    places = [(1, "a"), (2, "a"), (1, "b")]
    first, second, other = (RemoteColumn.whole(handle, name, list("uvwxyz")) for handle, name in places)
    both = RemoteColumn.concat([second, first]).gather(np.array([8, 3, 6, 3]))
    with_none = RemoteColumn.place([first.gather(np.array([5, 2]))], [np.array([3, 1])], 4)
    found = rows_by_place([both, with_none, other.gather(np.array([4])), first.gather(np.array([], dtype=np.int64))])
    assert {place: rows.tolist() for place, rows in found.items()} == {
        (1, "a"): [0, 2, 5],
        (2, "a"): [3],
        (1, "b"): [4],
    }
    assert rows_by_place([]) == {}
