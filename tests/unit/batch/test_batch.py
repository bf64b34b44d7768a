from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.fields import FIELDS
from rlpack.batch.ragged import Ragged
from rlpack.packing import PackingError
from tests.builders import tiny_rollouts

few = settings(max_examples=40, deadline=None)


def make(rows: list[list[int]]) -> BatchedDataDict:
    """Return a batch whose columns are all derived from `rows`."""
    tokens = Ragged.from_rows(rows, torch.int64)
    return BatchedDataDict(
        {
            "input_ids": tokens,
            "halves": tokens.with_values(tokens.values / 2),
            "sums": Ragged.from_rows([[sum(row)] for row in rows], torch.int64),
            "place": torch.arange(len(rows)),
            "uid": [str(row) for row in rows],
        }
    )


def contents(batch: BatchedDataDict) -> list[tuple]:
    columns = [batch["input_ids"].rows(), batch["halves"].rows(), batch["sums"].rows(), batch["place"], batch["uid"]]
    return [(a.tolist(), b.tolist(), c.tolist(), int(d), e) for a, b, c, d, e in zip(*columns, strict=True)]


ROWS = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=7)


@few
@given(ROWS, st.data())
def test_every_column_is_selected_alike(rows, data):
    batch = make(rows)
    selected = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    assert contents(batch.select(selected)) == [contents(batch)[row] for row in selected]


@few
@given(ROWS, st.data())
def test_split_and_concat_are_inverse(rows, data):
    batch = make(rows)
    cut = data.draw(st.integers(0, len(rows)))
    parts = batch.split([cut, 0, len(rows) - cut])
    assert [part.num_rows for part in parts] == [cut, 0, len(rows) - cut]
    joined = BatchedDataDict.concat(parts)
    assert contents(joined) == contents(batch)
    assert joined.row_ids.tolist() == batch.row_ids.tolist()


@few
@given(ROWS, st.integers(0, 3))
def test_repeat_interleave_puts_copies_side_by_side(rows, n):
    repeated = make(rows).repeat_interleave(n)
    assert contents(repeated) == [row for row in contents(make(rows)) for _ in range(n)]
    assert repeated.row_ids.tolist() == list(range(n * len(rows)))


def test_ids_stay_with_their_rows_until_one_comes_twice():
    batch = make([[1], [2], [3]])
    assert batch.select([2, 0]).row_ids.tolist() == [2, 0]
    assert batch.select([2, 0]).select([1]).row_ids.tolist() == [0]
    assert batch.select([2, 2]).row_ids.tolist() == [0, 1]
    assert BatchedDataDict.concat([batch.select([2]), batch.select([0])]).row_ids.tolist() == [2, 0]
    assert BatchedDataDict.concat([batch, batch]).row_ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_columns_are_kept_dropped_renamed_and_joined():
    batch = make([[1, 2], [3]])
    assert list(batch.keep(["uid", "place"])) == ["uid", "place"]
    assert "uid" not in batch.drop(["uid"])
    assert list(batch.keep(["uid", "place"]).rename({"uid": "name"})) == ["name", "place"]
    swapped = batch.keep(["place", "sums"]).rename({"place": "sums", "sums": "place"})
    assert swapped["sums"].tolist() == [0, 1]
    joined = batch.keep(["uid"]).union({"rewards": torch.zeros(2)})
    assert list(joined) == ["uid", "rewards"]
    assert list(batch.keep(["uid"]).union(batch.keep(["place"]))) == ["uid", "place"]


def test_copies_do_not_share_their_mapping():
    batch = make([[1]])
    other = batch.copy()
    other["rewards"] = torch.zeros(1)
    del other["uid"]
    assert "rewards" not in batch
    assert "uid" in batch


@pytest.mark.parametrize("ids", [[5, 3], np.array([5, 3]), torch.tensor([5, 3]), torch.tensor([5, 3]).int()])
def test_a_batch_owns_its_ids_and_lists(ids):
    names = ["a", "b"]
    batch = BatchedDataDict({"uid": names}, row_ids=ids)
    other = batch.copy()
    ids[0], names[0] = 9, "changed"
    batch["uid"][1] = "changed"
    assert batch.row_ids.tolist() == [5, 3]
    assert (batch["uid"], other["uid"]) == (["a", "changed"], ["a", "b"])
    assert batch.row_ids.dtype == np.int64


def test_padding_is_the_fields_own():
    batch = BatchedDataDict({"response_mask": Ragged.from_rows([[True, True], [True]], torch.bool)})
    assert batch.padded("response_mask").tolist() == [[True, True], [True, False]]
    assert all(field.name == name for name, field in FIELDS.items())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b["reward"], "no column 'reward'; the batch has input_ids, halves"),
        (lambda b: b.keep(["nothing"]), "no column 'nothing'"),
        (lambda b: b.drop(["nothing"]), "no column 'nothing'"),
        (lambda b: b.rename({"nothing": "x"}), "no column 'nothing'"),
        (lambda b: b.rename({"uid": "place"}), r"two columns the same name \['place'\]"),
        (lambda b: b.update({"x": torch.zeros(3)}), "column 'x' has 3 rows and the batch has 2"),
        (lambda b: b.update({"x": torch.zeros(())}), "column 'x': .* not a Tensor"),
        (lambda b: b.update({"x": (1, 2)}), "column 'x': .* not a tuple"),
        (lambda b: b.update({"rewards": torch.zeros(2, dtype=torch.float64)}), "'rewards' is per-row torch.float64"),
        (lambda b: b.update({"input_ids": torch.zeros(2, dtype=torch.int64)}), "'input_ids' is per-row torch.int64"),
        (lambda b: b.update({"uid": torch.zeros(2)}), "'uid' is per-row .*float32; rlpack.batch.fields requires list"),
        (lambda b: b.union({"uid": ["a", "b"]}), r"columns \['uid'\] are in both"),
        (lambda b: b.union(b.select([1, 0]).rename({n: n + "2" for n in b})), "rows of the two batches differ"),
        (lambda b: b.union(b.select([1]).rename({n: n + "2" for n in b})), "has 1 rows and .* has 2"),
        (lambda b: b.split([1, 2]), "add up to 3, and the batch has 2 rows"),
        (lambda b: b.split([3, -1]), r"contain -1; a part has 0 rows or more"),
        (lambda b: b.ragged("uid"), "'uid' is list; it must be per-token"),
        (lambda b: b.dense("uid"), "'uid' is list; it must be a per-row"),
        (lambda b: b.concat([]), "at least one batch"),
        (lambda b: b.concat([b, b.drop(["uid"])]), "'uid' is not in all batches; batches 0 and 1"),
        (lambda b: b.concat([b, b.keep([]).union({**b, "halves": ["a", "b"]})]), "'halves' is Ragged in .* list"),
        (lambda b: b.concat([b, b.keep([]).union({**b, "place": torch.zeros(2)})]), "'place' differs between"),
        (lambda b: b.num_steps, "no plan is attached"),
        (lambda b: b.select([True, 1]), "rows mix booleans with numbers"),
        (lambda b: b.repeat_interleave(-1), "n is -1; it must be an integer"),
        (lambda b: b.update({"rewards": torch.zeros(2, 3)}), r"'rewards' is \[2, 3\]; it must be \[B\]"),
        (lambda b: b.update({"valid": torch.ones(2, 1, dtype=torch.bool)}), r"'valid' is \[2, 1\]"),
        (lambda b: BatchedDataDict({"a": np.zeros(3)}), "column 'a': .* not a ndarray"),
        (lambda b: BatchedDataDict({}, row_ids=[1, 1]), "2 ids, of which 1 are distinct"),
        (lambda b: BatchedDataDict({}, row_ids=[1.0, 2.0]), "row_ids are float64"),
        (lambda b: BatchedDataDict({}, row_ids=np.array([1.5])), "row_ids are float64"),
        (lambda b: BatchedDataDict({}, row_ids=torch.tensor([1.0])), "row_ids are float32"),
        (lambda b: BatchedDataDict({}, row_ids=torch.tensor([True])), "row_ids are bool"),
        (lambda b: BatchedDataDict({}, row_ids=[0, True]), "row_ids mix booleans"),
        (lambda b: BatchedDataDict({}, row_ids=np.zeros((1, 1), dtype=np.int64)), "row_ids are int64 with 2 dim"),
        (
            lambda b: BatchedDataDict({}, row_ids=np.array([2**64 - 1], dtype=np.uint64)),
            "maximum 1844674407370955161",
        ),
    ],
)
def test_misuse_is_one_error_that_names_key_and_sizes(change, text):
    with pytest.raises(DataError, match=text):
        change(make([[1, 2], [3]]))


def test_a_missing_column_is_a_key_error_too():
    batch = make([[1]])
    assert batch.get("nothing") is None
    with pytest.raises(KeyError, match="no column 'nothing'"):
        batch["nothing"]


def test_dense_and_list_columns_of_no_row_are_fine():
    empty = BatchedDataDict({"input_ids": Ragged.from_rows([], torch.int64), "uid": []})
    assert empty.num_rows == 0
    assert empty.select([]).num_rows == 0
    assert BatchedDataDict({}).num_rows == 0
    assert BatchedDataDict.concat([empty, empty]).num_rows == 0
    assert make([[1]]).select([])["input_ids"].values.dtype == torch.int64


def test_a_part_of_fewer_than_no_rows_is_named():
    with pytest.raises(DataError, match=r"sizes \[4, -1\] contain -1; a part has 0 rows or more"):
        tiny_rollouts([(2, 4)] * 3).split([4, -1])


@pytest.mark.parametrize("batch_size", [2.0, 2.5, 0, -1, "2"])
def test_a_wrong_batch_size_is_named(batch_size: Any):
    with pytest.raises(PackingError, match=r"batch_size is .*; it has to be a whole number of at least 1, or None"):
        tiny_rollouts([(2, 4)] * 4).shard_by_batch_size(2, batch_size)
