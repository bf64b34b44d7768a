"""Adapter files in peft's format, and a digest that vLLM's process checks before it reads them.

Invariant (tests/unit/rollout/vllm/test_runtime_adapters.py): files that are missing, truncated, changed or from another
update are refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import save
from torch import Tensor

from rlpack.rollout.errors import EngineError

_SETTINGS, _MATRICES = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder: Path, settings: Mapping[str, Any], matrices: Mapping[str, Tensor]) -> str:
    """Write an adapter; return the digest of its contents, computed before they are written."""
    contiguous = {name: matrix.contiguous() for name, matrix in matrices.items()}
    files = {_SETTINGS: json.dumps(settings).encode(), _MATRICES: save(contiguous, metadata={"format": "pt"})}
    found = _digest(files)
    for name, data in files.items():
        folder.joinpath(name).write_bytes(data)
    return found


def check_adapter(folder: Path, expected: str) -> None:
    """Raise unless a folder has the adapter with this digest.

    Raises:
        EngineError: a file is missing, or was changed since it was made.
    """
    try:
        files = {name: folder.joinpath(name).read_bytes() for name in (_SETTINGS, _MATRICES)}
    except OSError as error:
        raise EngineError(f"the adapter can't be read from {folder}: {error}") from None
    if (found := _digest(files)) != expected:
        raise EngineError(f"the adapter in {folder} was corrupted in transit: its digest is {found}, not {expected}")


def _digest(files: Mapping[str, bytes]) -> str:
    """Return the xxh3-128 digest of names, sizes and bytes of files, as hexadecimal text."""
    hasher = xxhash.xxh3_128()
    for name, data in files.items():
        hasher.update(repr((name, len(data))).encode())
        hasher.update(data)
    return hasher.hexdigest()
