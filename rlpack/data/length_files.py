"""Read sequence lengths from a file, to make plans without the sequences themselves."""

import json
import os
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
        path: `.jsonl` with a number, or an object with `column`, on each line; one-dimensional `.npy`; `.parquet`.
        column: column of the lengths; None means `length`.

    Raises:
        DataError: the file is missing, empty or of another kind, a value is not a length, or `column` is set for plain
            numbers; the message names line and value.
    """
    if not os.path.isfile(path):  # false for a name that no file can have
        raise DataError(f"there is no file {path}; pass lengths as {', '.join(SUFFIXES)}, or a run directory")
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} has the unsupported suffix {path.suffix!r}; pass lengths as {', '.join(SUFFIXES)}")
    if path.suffix == ".npy":
        lengths = _checked(path, _npy(path), 0)
    elif path.suffix == ".parquet":
        lengths = _checked(path, _parquet(path, column or _COLUMN), 0)
    else:
        lengths = _jsonl(path, column)
    if not lengths.size:
        raise DataError(f"{path} has no lengths; pass a file with at least one")
    return lengths


def _jsonl(path: Path, requested: str | None) -> np.ndarray:
    """Return the lengths of a JSONL file; blank lines are skipped."""
    lengths, numbers, column, num_plain = [], [], requested or _COLUMN, 0
    for number, value in _values(path):
        if isinstance(value, dict):
            if column not in value:
                raise DataError(
                    f"{path}:{number} has no {column!r}; it has {', '.join(value) or 'nothing'}; set --column"
                )
            value = value[column]
        else:
            num_plain += 1
        lengths.append(value)
        numbers.append(number)
    if requested is not None and lengths and num_plain == len(lengths):
        raise DataError(f"{path} has plain numbers, which have no column {requested!r}; remove --column")
    try:
        return check_lengths(lengths)
    except PackingError:
        for number, value in zip(numbers, lengths, strict=True):
            _checked(path, [value], number)
        raise


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _value(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}; make it readable") from error


def _value(line: str, place: str) -> Any:
    """Return the value of a line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {line.strip()[:60]!r}; write one length per line") from error


def _checked(path: Path, values: Any, line: int) -> np.ndarray:
    """Return checked lengths.

    `line` is the line of a single value, for errors; 0 for a file without lines.
    """
    try:
        return check_lengths(values)
    except PackingError as error:
        place = f"{path}:{line}: " if line else f"{path}: "
        raise DataError(
            place + (f"{values[0]!r} is not a length; it must be an integer of at least 0" if line else str(error))
        ) from error


def _npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} can't be read as NPY: {error}; write it with numpy.save, without objects") from error


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
