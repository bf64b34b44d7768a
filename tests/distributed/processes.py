"""Rank processes without Ray, from a fork server that has the imports already.

Arguments and results are copied. `multiprocessing` would share the memory of tensors with one open file for each, and
modules with thousands of them would exceed the usual limit of 1024 files.
"""

import io
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from rlpack.gloo import GLOO
from tests.fork_server import fork_context


def _rank(store: str, rank: int, size: int, timeout_s: float, function: Callable, packed: bytes) -> bytes:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        GLOO, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        return _pack(function(init_device_mesh("cpu", (size,)), rank, *_unpack(packed)))
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(tmp_path: Path, size: int, function: Callable, *arguments: object, timeout_s: float = 30) -> list[Any]:
    """Return what `function(mesh, rank, *arguments)` returns on each of `size` processes."""
    with ProcessPoolExecutor(size, mp_context=fork_context()) as pool:
        store = f"{tempfile.mkdtemp(dir=tmp_path)}/store"
        packed = _pack(arguments)
        futures = [pool.submit(_rank, store, rank, size, timeout_s, function, packed) for rank in range(size)]
        processes = list(pool._processes.values())  # the pool forgets them when one dies
        try:
            return [_unpack(future.result(timeout=90)) for future in futures]
        except BrokenProcessPool as error:
            codes = [process.exitcode for process in processes]
            error.add_note(f"exit codes of the processes (a negative one is a signal): {codes}")
            raise


def _pack(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    # Objects of any class, but only from this test's own processes.
    return torch.load(io.BytesIO(packed), weights_only=False)
