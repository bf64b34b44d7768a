"""Read the lengths of sequences from a file: what plans are made from without the sequences themselves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import check_lengths

_COLUMN = "length"
SUFFIXES = (".jsonl", ".npy", ".parquet")


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """Return the lengths in a file, int64 [B].

    Args:
        path: `.jsonl` with a number, or an object with `column`, in each line; `.npy` with one dimension; `.parquet`.
        column: where a row holds its length; None takes `length`.

    Raises:
        DataError: the file is missing, empty or of another kind, a value is no length, or a column was given for
            plain numbers; names line and value.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}; give lengths as {', '.join(SUFFIXES)}, or a run's directory")
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} ends in {path.suffix or 'nothing'}; give lengths as {', '.join(SUFFIXES)}")
    if path.suffix == ".npy":
        lengths = _checked(path, _npy(path), 0)
    elif path.suffix == ".parquet":
        lengths = _checked(path, _parquet(path, column or _COLUMN), 0)
    else:
        lengths = _jsonl(path, column)
    if not lengths.size:
        raise DataError(f"{path} holds no length; give a file with at least one")
    return lengths


def _jsonl(path: Path, asked: str | None) -> np.ndarray:
    """Return the lengths of a file with one JSON value a line; blank lines are skipped."""
    found, numbers, column, plain = [], [], asked or _COLUMN, 0
    for number, value in _values(path):
        if isinstance(value, dict):
            if column not in value:
                raise DataError(
                    f"{path}:{number} has no {column!r}; it has {', '.join(value) or 'nothing'}; set --column"
                )
            value = value[column]
        else:
            plain += 1
        found.append(value)
        numbers.append(number)
    if asked is not None and found and plain == len(found):
        raise DataError(f"{path} holds plain numbers, which have no column {asked!r}; leave --column out")
    try:
        return check_lengths(found)
    except PackingError:
        for number, value in zip(numbers, found, strict=True):
            _checked(path, [value], number)
        raise


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each line."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}:{number} is not JSON: {line.strip()[:60]!r}; write one length a line"
                ) from error


def _checked(path: Path, values: Any, line: int) -> np.ndarray:
    """Return values as lengths; `line` is where the only one stands, 0 for a file without lines."""
    try:
        return check_lengths(values)
    except PackingError as error:
        place = f"{path}:{line}: " if line else f"{path}: "
        raise DataError(
            place + (f"{values[0]!r} is no length; give a whole number of at least 0" if line else str(error))
        ) from error


def _npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} can't be read as NPY: {error}; write it by numpy.save, without objects") from error


def _parquet(path: Path, column: str) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if (count := names.count(column)) > 1:
                raise DataError(f"{path} has {count} columns {column!r}; rename one, or set --column to another")
            if not count:
                raise DataError(f"{path} has no column {column!r}; it has {', '.join(names)}; set --column")
            return file.read(columns=[column]).column(column).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} can't be read as Parquet: {error}; write the file again") from error
