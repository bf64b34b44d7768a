"""Rank processes without Ray, from a fork server that has the imports already."""

import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.fork_server import fork_context

_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)


def _rank(store: str, rank: int, size: int, timeout_s: float, function: Callable, arguments: tuple) -> Any:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        return function(init_device_mesh("cpu", (size,)), rank, *arguments)
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(tmp_path: Path, size: int, function: Callable, *arguments: object, timeout_s: float = 30) -> list[Any]:
    """Return what `function(mesh, rank, *arguments)` returns on each of `size` processes.

    Ranks that crash run once more, with a warning: once in some thousand processes, a thread of PyTorch's gloo group
    fails in malloc (torch 2.13), with PyTorch's own collectives, too.
    """
    arguments = (function, arguments)
    results, error, codes = _attempt(tmp_path, size, timeout_s, arguments)
    if error is not None and any(code in _CRASHES for code in codes):
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # a line of pytest's summary; other warnings are errors
            warnings.warn(f"ranks ended with the exit codes {codes} and run again: {error!r}", stacklevel=2)
        results, error, codes = _attempt(tmp_path, size, timeout_s, arguments)
    if error is not None:
        error.add_note(f"exit codes of the processes (a negative one is a signal): {codes}")
        raise error
    return results


def _attempt(
    tmp_path: Path, size: int, timeout_s: float, arguments: tuple
) -> tuple[list[Any], Exception | None, list[int | None]]:
    """Run the ranks once; return their results, or the first error, and the exit codes of processes that ended."""
    with ProcessPoolExecutor(size, mp_context=fork_context()) as pool:
        store = f"{tempfile.mkdtemp(dir=tmp_path)}/store"
        futures = [pool.submit(_rank, store, rank, size, timeout_s, *arguments) for rank in range(size)]
        processes = list(pool._processes.values())  # the pool forgets them when one dies
        try:
            return [future.result(timeout=90) for future in futures], None, []
        except Exception as error:  # noqa: BLE001 - `on_ranks` raises it
            time.sleep(1)  # a rank may notice that another crashed before that one has an exit code
            return [], error, [process.exitcode for process in processes]
