"""Copy runs of tokens between columns at memory bandwidth, each byte once.

A run is a range of consecutive entries. Large copies use a Numba loop over memcpy on several threads, small ones NumPy.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.errors import DataError

# Bytes per thread; below this, starting another thread takes longer than it saves.
_THREAD_BYTES = 2**23
# Copies below both limits take less time than compiling the Numba loop, which can't be cached on disk.
_SMALL_BYTES, _FEW_RUNS = 2**20, 2**10


def can_copy(values: Tensor) -> bool:
    """Return whether runs of `values` can be copied: on the CPU, and off the autograd graph."""
    return values.device.type == "cpu" and not values.requires_grad


def clone(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a copy of a tensor on its device, as `copy.deepcopy` with this `memo` does, but of a view's entries alone.

    Raises:
        DataError: the tensor was computed on the autograd graph, so a copy would lose its gradient.
    """
    if not tensor.is_leaf:
        raise DataError("a tensor on the autograd graph can't be copied; detach() it first")
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def new_values(like: Tensor, count: int) -> Tensor:
    """Return an uninitialized CPU tensor of `count` entries with the dtype and entry shape of `like`.

    NumPy requests huge pages and torch does not, which makes the first write several times as fast.
    """
    if size := count * prod(like.shape[1:]) * like.element_size():
        return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(like.dtype).view(count, *like.shape[1:])
    return like.new_empty((count, *like.shape[1:]))


def copy_runs(source: Tensor, target: Tensor, starts: Tensor, target_starts: Tensor, lengths: Tensor) -> None:
    """Copy runs of a single tensor; see `copy_from`."""
    copy_from([source], target, torch.zeros_like(starts), starts, target_starts, lengths)


def copy_from(
    sources: Sequence[Tensor],
    target: Tensor,
    source_of_run: Tensor,
    starts: Tensor,
    target_starts: Tensor,
    lengths: Tensor,
) -> None:
    """Copy run i from `starts[i]` of source `source_of_run[i]` to `target_starts[i]` of `target` (int64 [n] each).

    Run i has `lengths[i]` entries. Sources and target are CPU tensors of one dtype and entry shape, and the target is
    contiguous. Runs must not overlap in the target. They are copied in order. Ascending target starts are fastest,
    because memory is allocated page by page at the first write.

    Raises:
        IndexError: a run is outside of its column.
    """
    if not target.numel() or not lengths.numel():
        return
    width = target.element_size() * prod(target.shape[1:])
    runs = np.stack([source_of_run.numpy(), *((run * width).numpy() for run in (starts, target_starts, lengths))])
    total = int(runs[3].sum())
    _check_inside(runs, [source.numel() * source.element_size() for source in sources], len(target) * width)
    threads = min(torch.get_num_threads(), 1 + total // _THREAD_BYTES)
    bounds = np.searchsorted(np.cumsum(runs[3]), np.linspace(0, total, threads + 1)[1:-1])
    shares = np.split(runs, bounds, axis=1)
    copy = _copy_by_numpy if total < _SMALL_BYTES and runs.shape[1] < _FEW_RUNS else _copier()
    source_bytes, target_bytes = [_bytes(source) for source in sources], _bytes(target)
    if threads == 1:
        copy(source_bytes, target_bytes, *shares[0])
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda share: copy(source_bytes, target_bytes, *share), shares))


def _check_inside(runs: np.ndarray, sources: Sequence[int], target: int) -> None:
    """Raise an `IndexError` unless all runs are inside sources and target of these sizes, in bytes."""
    of_run, starts, target_starts, sizes = runs
    if of_run.min() >= 0 and of_run.max() < len(sources) and runs.min() >= 0:
        ends = np.asarray(sources, dtype=np.int64)[of_run]
        if (starts + sizes <= ends).all() and (target_starts + sizes).max() <= target:
            return
    raise IndexError("a run of tokens is outside of its column")


def _bytes(values: Tensor) -> np.ndarray:
    """Return the memory of a tensor as uint8, copied if it is not contiguous."""
    dense = values.resolve_conj().resolve_neg().contiguous()
    # A single-entry tensor counts as contiguous whatever its stride, and contiguous() keeps that stride.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()


def _copy_by_numpy(
    sources: Sequence[np.ndarray],
    target: np.ndarray,
    source_of_run: np.ndarray,
    starts: np.ndarray,
    target_starts: np.ndarray,
    sizes: np.ndarray,
) -> None:
    """Copy runs of bytes with NumPy."""
    runs = zip(source_of_run.tolist(), starts.tolist(), target_starts.tolist(), sizes.tolist(), strict=True)
    for source, start, goal, size in runs:
        target[goal : goal + size] = sources[source][start : start + size]


@cache
def _copier() -> Callable[..., None]:
    """Return the function that copies runs of bytes, compiled if Numba is installed.

    The compiled loop releases the GIL. It calls memcpy because slices in Numba copy entry by entry, which is ten times
    as slow for bytes.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in {"", "0"}:
        return _copy_by_numpy
    try:
        import numba
        from llvmlite import ir
        from numba.core import cgutils, types
        from numba.extending import intrinsic
    except ImportError:
        return _copy_by_numpy

    @intrinsic
    def memcpy(context: Any, target: Any, source: Any, size: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = ir.IntType(8).as_pointer()
            goal, start = (builder.inttoptr(address, pointer) for address in arguments[:2])
            cgutils.raw_memcpy(builder, goal, start, arguments[2], 1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    @numba.njit(nogil=True)
    def loop(
        addresses: np.ndarray,
        target: np.ndarray,
        source_of_run: np.ndarray,
        starts: np.ndarray,
        target_starts: np.ndarray,
        sizes: np.ndarray,
    ) -> None:
        goal = target.ctypes.data
        for run in range(sizes.size):
            start = addresses[source_of_run[run]] + starts[run]
            # Numba passes the first argument, the typing context.
            memcpy(goal + target_starts[run], start, sizes[run])  # pyright: ignore[reportCallIssue]

    def copy(sources: Sequence[np.ndarray], target: np.ndarray, *runs: np.ndarray) -> None:
        loop(np.array([source.ctypes.data for source in sources]), target, *runs)

    return copy
