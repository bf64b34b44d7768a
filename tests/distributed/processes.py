"""Rank processes without Ray, from a fork server that has the imports already."""

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


def _rank(store: str, rank: int, size: int, timeout_s: float, function: Callable, arguments: tuple) -> Any:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        GLOO, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        return function(init_device_mesh("cpu", (size,)), rank, *arguments)
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(tmp_path: Path, size: int, function: Callable, *arguments: object, timeout_s: float = 30) -> list[Any]:
    """Return what `function(mesh, rank, *arguments)` returns on each of `size` processes."""
    with ProcessPoolExecutor(size, mp_context=fork_context()) as pool:
        store = f"{tempfile.mkdtemp(dir=tmp_path)}/store"
        futures = [pool.submit(_rank, store, rank, size, timeout_s, function, arguments) for rank in range(size)]
        processes = list(pool._processes.values())  # the pool forgets them when one dies
        try:
            return [future.result(timeout=90) for future in futures]
        except BrokenProcessPool as error:
            codes = [process.exitcode for process in processes]
            error.add_note(f"exit codes of the processes (a negative one is a signal): {codes}")
            raise
