"""Read torch's distributed checkpoint format (DCP) without running code from it.

The format's index, `.metadata`, is a pickle, and so are values that aren't tensors. A run directory may come from an
unknown source, with matching hashes.

Invariants (tests/unit/checkpoint/test_restricted.py):

1. Only the classes in `_ALLOWED`, which DCP writes for tensors and values, are instantiated from the index.
2. Tensors and other values are read with `weights_only=True`.
3. The index names only files in the same folder.
4. Anything else is a `CheckpointError` that names the class and the file.
"""

import io
import pickle
import re
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from rlpack.checkpoint.errors import CheckpointError

INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_METADATA, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a name up in a table of layouts
    *(("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
    # The type of the folder's path, which the index contains.
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles a DCP index, allowing only the classes that DCP writes."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return a class of the index.

        Raises:
            CheckpointError: an index doesn't need this class.
        """
        if (module_name, global_name) not in _ALLOWED:
            raise _foreign(self._path, f"{module_name}.{global_name}")
        if global_name == "PosixPath":  # whose module depends on Python's version
            return PosixPath
        return super().find_class(module_name, global_name)


class RestrictedReader(FileSystemReader):
    """Reads the files of one folder.

    The constructor reads the index, because DCP would read it inside its own error handling and then try another file.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Raises:
            CheckpointError: it has a class that DCP doesn't write, or names files of other folders.
        """
        super().__init__(folder)
        self._index = read_index(folder)
        self._opened = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index."""
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors and values.

        Raises:
            CheckpointError: one contains a class that isn't needed for weights.
        """
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            raise _foreign(Path(self.path) / self._opened, _named(error)) from error

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        self._opened = sinfo.relative_path
        return super()._slice_file(file, sinfo)


class RestrictedPlanner(DefaultLoadPlanner):
    """Loads values that aren't tensors, such as betas, without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one value: read it safely, and give the parent class a copy that it may unpickle."""
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


def read_index(folder: Path) -> Metadata:
    """Return the index of a folder that DCP wrote.

    Raises:
        CheckpointError: it isn't an index, has a class that DCP doesn't write, or names files of other folders.
    """
    path = folder / INDEX
    try:
        index = _IndexUnpickler(path.read_bytes(), path).load()
        assert isinstance(index, Metadata), f"it contains a {type(index).__name__}"
        names = {entry.relative_path for entry in index.storage_data.values()}
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} isn't an index of a distributed checkpoint: {error!r}") from error
    for name in names:
        file = folder / str(name)
        if PurePosixPath(str(name)).name != name or file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{path} refers to {name!r}, which isn't a file of its folder")
    return index


def _named(error: pickle.UnpicklingError) -> str:
    """Return the class that torch refused to load, or the reason that it gave."""
    match = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"WeightsUnpickler error: (.+)", str(error))
    return match[1] if match else repr(error)


def _foreign(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} contains {name}, which no checkpoint of weights needs and which could run code; the file isn't read: "
        "use only checkpoints that you trust"
    )
