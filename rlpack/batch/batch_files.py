"""Write a batch to files, and read it back bit for bit: tensors as safetensors, lists as JSON.

Neither format can run code when it is read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.fields import Column
from rlpack.batch.ragged import Ragged
from rlpack.safe_files import MOST_LEVELS, parse_json, read_object

_TENSORS, _LISTS = "tensors.safetensors", "lists.json"
# Suffixes of tensor names: the first two for the two tensors of a ragged column, the third for any other tensor.
_VALUES, _LENGTHS, _TENSOR = ":values", ":lengths", ":tensor"
_ROW_IDS, _EXPLICIT = "row_ids", "explicit"
_LEVELS = 3  # of the file, around an entry


def write_batch(batch: BatchedDataDict, folder: Path) -> None:
    """Write a batch into a new folder.

    Args:
        batch: the batch, with all of its columns in this process.
        folder: created; its parent exists.

    Raises:
        DataError: JSON would change an entry of a list.
        OSError: a file can't be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, column in batch.items():
        if isinstance(column, Ragged):
            tensors |= {name + _VALUES: column.values, name + _LENGTHS: column.lengths}
        elif isinstance(column, Tensor):
            tensors[name + _TENSOR] = column
    lists = {name: column for name, column in batch.items() if isinstance(column, list)}
    check_lists(batch)
    folder.mkdir()
    try:
        save_file(_without_shared_memory(tensors), folder / _TENSORS)
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"{folder / _TENSORS} can't be written: {error}") from error
    ids = {_ROW_IDS: batch.row_ids.tolist(), _EXPLICIT: batch.has_explicit_ids}
    (folder / _LISTS).write_text(json.dumps({"columns": lists} | ids), encoding="utf-8")


def check_lists(batch: BatchedDataDict) -> None:
    """Raise unless the lists of a batch survive JSON unchanged.

    Raises:
        DataError: names the column and the type of an entry.
    """
    for name, column in batch.items():
        if not isinstance(column, list):
            continue
        for entry in column:
            if not _survives_json(entry):
                raise DataError(
                    f"column {name!r} has an entry of type {type(entry).__name__} that JSON would change, so the batch "
                    "can't be written to a file; use texts, numbers, booleans, null, lists, and dicts with text keys, "
                    f"nested at most {MOST_LEVELS - _LEVELS} levels deep"
                )


def read_batch(folder: Path) -> BatchedDataDict:
    """Return the batch that `write_batch` wrote into `folder`.

    Equal entries of a list are one object, as the responses to a prompt share it in the batch of a run, so that they
    take its room in the object store once.

    Raises:
        DataError: a file is missing, or was not written by `write_batch`.
    """
    try:
        tensors = load_file(folder / _TENSORS)
        document = read_object(folder / _LISTS, of_any_size=True)  # as large as the texts of the batch
        columns: dict[str, Column] = dict(document["columns"])
        columns |= {name: _with_shared_entries(column) for name, column in columns.items() if isinstance(column, list)}
        for name, tensor in tensors.items():
            if name.endswith(_VALUES):
                column = name.removesuffix(_VALUES)
                columns[column] = Ragged(tensor, tensors[column + _LENGTHS])
            elif name.endswith(_TENSOR):
                columns[name.removesuffix(_TENSOR)] = tensor
        batch = BatchedDataDict(columns, row_ids=document[_ROW_IDS])
        batch.has_explicit_ids = bool(document[_EXPLICIT])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"the batch in {folder} can't be read: {error}") from error
    return batch


def _with_shared_entries(column: list[Any]) -> list[Any]:
    """Return a list in which equal entries are one object; 1, 1.0 and True are not equal."""
    entries: dict[str, Any] = {}
    return [entries.setdefault(json.dumps(entry), entry) for entry in column]


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors; those in memory of an earlier one are cloned, as safetensors refuses shared memory."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        contiguous = tensor.contiguous()
        if (storage := contiguous.untyped_storage().data_ptr()) in storages:
            contiguous = contiguous.clone()
        storages.add(storage)
        separate[name] = contiguous
    return separate


def _survives_json(entry: Any) -> bool:
    # Equal `repr` also tells 1 from 1.0 and True, and holds for NaN.
    wrapped = [[[entry]]]  # as deep as in the file
    try:
        return repr(parse_json(json.dumps(wrapped))) == repr(wrapped)
    except (TypeError, ValueError, RecursionError):
        return False
