"""Columns of dtypes that torch or NumPy supports only in part behave like all others."""

import pickle

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.packing import Batching, make_plan

UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
TYPES = [*UNSIGNED, *FLOAT8, torch.bfloat16, torch.complex64]
LENGTHS = torch.tensor([2, 5, 1])


def entries(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `count` entries whose bytes are 1, 2, 3, …"""
    return torch.arange(1, 1 + count * dtype.itemsize, dtype=torch.uint8).view(dtype)


def bits(values: torch.Tensor) -> list[int]:
    return values.contiguous().view(torch.uint8).flatten().tolist()


def batch_of(dtype: torch.dtype) -> BatchedDataDict:
    tokens = Ragged(torch.arange(8), LENGTHS)
    columns = {
        "row": entries(3, dtype),
        "wide": entries(6, dtype).view(3, 2),
        "token": Ragged(entries(8, dtype), LENGTHS),
    }
    return BatchedDataDict({"input_ids": tokens, **columns})


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_of_every_dtype_are_selected_in_any_order(dtype: torch.dtype) -> None:
    result = batch_of(dtype).select([2, 0, 0])
    size = dtype.itemsize
    row = {number: list(range(1 + number * size, 1 + (number + 1) * size)) for number in range(8)}
    assert bits(result["row"]) == row[2] + row[0] + row[0]
    assert bits(result["wide"]) == row[4] + row[5] + 2 * (row[0] + row[1])
    assert bits(result["token"].values) == row[7] + 2 * (row[0] + row[1])
    assert {result["row"].dtype, result["wide"].dtype, result["token"].values.dtype} == {dtype}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_dropped_rows_of_every_dtype_are_restored_as_zeros(dtype: torch.dtype) -> None:
    batch = batch_of(dtype)
    plan = make_plan(LENGTHS.numpy(), Batching(max_tokens=4, overlong="drop"), dp_size=2)
    result = batch.restore(batch.shard(plan), plan=plan)
    for name, per_row in (("row", 1), ("wide", 2)):
        width = per_row * dtype.itemsize
        assert bits(result[name]) == [*bits(batch[name])[:width], *[0] * width, *bits(batch[name])[2 * width :]]
    rows = result["token"].rows()
    assert [bits(row) for row in (rows[0], rows[2])] == [bits(row) for row in (batch["token"][0], batch["token"][2])]
    assert bits(rows[1]) == [0] * 5 * dtype.itemsize


@pytest.mark.parametrize("dtype", [*UNSIGNED, *FLOAT8], ids=str)
def test_every_dtype_is_padded_and_unpadded(dtype: torch.dtype) -> None:
    column = Ragged(entries(8, dtype), LENGTHS)
    back = Ragged.from_padded(column.to_padded(), LENGTHS)
    assert (bits(back.values), back.values.dtype) == (bits(column.values), dtype)


@pytest.mark.parametrize("dtype", [*TYPES, torch.complex32], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_columns_of_every_dtype_can_be_pickled(dtype: torch.dtype) -> None:
    batch = batch_of(dtype)
    back = pickle.loads(pickle.dumps(batch, protocol=5))
    assert bits(back["wide"]) == bits(batch["wide"])
    assert (bits(back["token"].values), back["token"].values.dtype) == (bits(batch["token"].values), dtype)


def test_lazy_conjugates_and_negatives_can_be_pickled() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    batch = BatchedDataDict({"conjugate": numbers.conj(), "imaginary": numbers.conj().imag})
    back = pickle.loads(pickle.dumps(batch, protocol=5))
    assert back["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert back["imaginary"].tolist() == [-2.0, 4.0]
