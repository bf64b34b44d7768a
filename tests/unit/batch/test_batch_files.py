"""Batches in files: what is read is what was written, bit for bit."""

import datetime
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

from rlpack import safe_files
from rlpack.batch import batch_files
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.batch_files import read_batch, write_batch
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from tests.file_sizes import no_larger_than


def example() -> BatchedDataDict:
    nan = torch.tensor([float("nan"), -0.0, 1e-45])
    columns = {
        "input_ids": Ragged.from_rows([[3, 1, 2], [], [7]], torch.int64),
        "response_mask": Ragged(torch.tensor([False, True, True, True]), torch.tensor([3, 0, 1])),
        "rollout_logprobs": Ragged(torch.tensor([0.0, -0.1, -1e-7, -3.0]), torch.tensor([3, 0, 1])),
        "rewards": nan,
        "same_memory": nan[:],
        "scores": torch.arange(6, dtype=torch.bfloat16).view(3, 2),
        "uid": ["a", "b", "c"],
        "answer": [None, {"text": "ü\n", "parts": [1, 2.0, True, float("inf")]}, 0.1 + 0.2],
    }
    return BatchedDataDict(columns, row_ids=[5, 2, 9])


def test_a_batch_is_read_as_it_was_written(tmp_path: Path):
    written = example()
    write_batch(written, tmp_path / "batch")
    read = read_batch(tmp_path / "batch")
    assert read.keys() == written.keys()
    assert (read.row_ids.tolist(), read.has_explicit_ids) == ([5, 2, 9], True)
    for name, column in written.items():
        if isinstance(column, Ragged):
            assert read[name].values.dtype == column.values.dtype
            assert torch.equal(read[name].values, column.values), name
            assert torch.equal(read[name].lengths, column.lengths), name
        elif isinstance(column, torch.Tensor):
            assert read[name].dtype == column.dtype
            bits = torch.int16 if column.dtype == torch.bfloat16 else torch.int32
            assert torch.equal(read[name].view(bits), column.view(bits)), name
        else:
            assert repr(read[name]) == repr(column), name


def test_responses_to_a_prompt_share_its_entries_again_once_they_are_read(tmp_path: Path):
    tests = [{"tests": ["x" * 10_000, 1]}, {"tests": ["y" * 10_000, 1.0]}]
    prompts = BatchedDataDict({"answer": tests, "uid": ["a", "b"], "passed": [1, True]})
    batch = prompts.repeat_interleave(8)
    write_batch(batch, tmp_path / "batch")
    read = read_batch(tmp_path / "batch")
    assert (read["answer"], read["uid"], repr(read["passed"])) == (batch["answer"], batch["uid"], repr(batch["passed"]))
    assert len({id(entry) for entry in read["answer"]}) == len({id(entry) for entry in read["uid"]}) == 2
    # Each takes its room once, as in the run.
    assert len(pickle.dumps(read["answer"])) < 2 * 10_000 + 1000


def test_only_columns_in_memory_of_another_one_are_copied_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    places: dict[str, int] = {}

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        places.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        safetensors.torch.save_file(tensors, path)

    monkeypatch.setattr(batch_files, "save_file", save_file)
    values, lengths = torch.arange(6), torch.tensor([2, 1])
    columns = {
        "input_ids": Ragged(values[:3], lengths),
        "rollout_logprobs": Ragged(torch.zeros(3), lengths),
        "further": values[3:5],
        "transposed": torch.arange(6).view(3, 2).t(),
    }
    write_batch(BatchedDataDict(columns), tmp_path / "batch")
    assert places["input_ids:values"] == values.data_ptr()
    assert places["input_ids:lengths"] == lengths.data_ptr()
    assert places["rollout_logprobs:values"] == columns["rollout_logprobs"].values.data_ptr()
    assert len(set(places.values())) == len(places)
    read = read_batch(tmp_path / "batch")
    assert [row.tolist() for row in read["input_ids"].rows()] == [[0, 1], [2]]
    assert (read["further"].tolist(), read["transposed"].tolist()) == ([3, 4], [[0, 2, 4], [1, 3, 5]])


def test_ids_that_nobody_passed_stay_so(tmp_path: Path):
    write_batch(BatchedDataDict({"rewards": torch.zeros(2)}), tmp_path / "batch")
    assert not read_batch(tmp_path / "batch").has_explicit_ids


@pytest.mark.parametrize(
    "entry", [(1, 2), {1: "a"}, datetime.date(2026, 1, 1), b"a", {"a": {"b": (1,)}}, torch.zeros(1)]
)
def test_an_entry_that_json_would_change_is_refused_by_its_column(tmp_path: Path, entry: object):
    batch = BatchedDataDict({"answer": ["fine", entry]})
    with pytest.raises(DataError, match=rf"column 'answer' has an entry of type {type(entry).__name__} that JSON"):
        write_batch(batch, tmp_path / "batch")
    assert not (tmp_path / "batch").exists()


def test_texts_may_be_larger_than_files_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safe_files, "MOST_BYTES", 100)
    write_batch(BatchedDataDict({"completion": ["ü" * 200]}), tmp_path / "batch")
    assert read_batch(tmp_path / "batch")["completion"] == ["ü" * 200]


def test_an_entry_is_nested_as_deep_as_can_be_read_or_refused(tmp_path: Path):
    entry: list = []
    for _ in range(60):
        entry = [entry]
    write_batch(BatchedDataDict({"answer": [entry]}), tmp_path / "batch")
    assert read_batch(tmp_path / "batch")["answer"] == [entry]
    with pytest.raises(DataError, match="nested at most 61 levels deep"):
        write_batch(BatchedDataDict({"answer": [[entry]]}), tmp_path / "deeper")


@pytest.mark.parametrize("damage", ["missing", "cut", "other lists", "other columns"])
def test_damaged_files_are_one_error(tmp_path: Path, damage: str):
    write_batch(example(), tmp_path / "batch")
    tensors, lists = tmp_path / "batch" / "tensors.safetensors", tmp_path / "batch" / "lists.json"
    if damage == "missing":
        lists.unlink()
    elif damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-3])
    elif damage == "other lists":
        lists.write_text("[]")
    else:
        lists.write_text(lists.read_text().replace('"b"', '"b", "d"'))
    with pytest.raises(DataError, match="can't be read"):
        read_batch(tmp_path / "batch")


def test_a_full_disk_is_an_error_of_the_file(tmp_path: Path):
    with no_larger_than(100), pytest.raises(OSError, match=r"batch/tensors.safetensors can't be written: .*too large"):
        write_batch(example(), tmp_path / "batch")
