import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rlpack.batch.errors import DataError
from rlpack.data.length_files import read_lengths


def test_lengths_come_from_lines_arrays_and_tables(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text("3\n\n0\n7\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"tokens": n}) + "\n" for n in (3, 0, 7)))
    np.save(tmp_path / "array.npy", np.array([3, 0, 7], dtype=np.int32))
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [3, 0, 7]}), tmp_path / "table.parquet")
    for name in ("plain.jsonl", "rows.jsonl", "array.npy", "table.parquet"):
        result = read_lengths(tmp_path / name, None if name == "plain.jsonl" else "tokens")
        assert (result.tolist(), result.dtype) == ([3, 0, 7], np.int64)


BAD_LINES = {
    "text": ('3\n"x"\n', r":2: 'x' is not a length"),
    "negative": ("3\n4\n-1\n", ":3: -1 is not a length"),
    "a fraction": ("2.5\n", ":1: 2.5 is not a length"),
    "not a number": ("NaN\n", ":1: nan is not a length"),
    "a truth": ("true\n", ":1: True is not a length; it must be an integer of at least 0"),
    "not JSON": ("3\nthree\n", ":2 is not JSON: 'three'; write one length per line"),
    "no column": ('{"size": 3}\n', ":1 has no 'length'; it has size; set --column"),
    "empty": ("\n", "has no lengths"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_with_its_value(tmp_path: Path, name: str) -> None:
    text, message = BAD_LINES[name]
    (tmp_path / "lengths.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_lengths(tmp_path / "lengths.jsonl")


def test_files_without_lengths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"no array")
    (tmp_path / "x.parquet").write_bytes(b"no table")
    np.save(tmp_path / "wide.npy", np.ones((2, 2), dtype=int))
    np.save(tmp_path / "fractions.npy", np.array([1.0, 2.0]))
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "other.parquet")
    for name, message in {
        "x.npy": "can't be read as NPY",
        "x.parquet": "can't be read as Parquet",
        "wide.npy": "shape",
        "fractions.npy": "row 0 is 1.0",
        "other.parquet": "has no column 'length'; it has a",
        "x.csv": "there is no file",
    }.items():
        with pytest.raises(DataError, match=message):
            read_lengths(tmp_path / name)
    (tmp_path / "x.csv").write_text("3")
    with pytest.raises(
        DataError, match=r"has the unsupported suffix '\.csv'; pass lengths as \.jsonl, \.npy, \.parquet"
    ):
        read_lengths(tmp_path / "x.csv")


def test_a_column_of_plain_numbers_and_a_duplicate_column_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text("3\n4\n")
    with pytest.raises(DataError, match="has plain numbers, which have no column 'tokens'; remove --column"):
        read_lengths(tmp_path / "plain.jsonl", "tokens")
    twice = pyarrow.Table.from_arrays([pyarrow.array([3]), pyarrow.array([4])], names=["tokens", "tokens"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="has 2 columns 'tokens'; rename one, or set --column to another"):
        read_lengths(tmp_path / "twice.parquet", "tokens")
