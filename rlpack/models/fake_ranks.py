"""One rank of many, in a single process: a process group whose collectives do nothing.

With tensors that have no values, code for many ranks then makes the same allocations on this rank as in a run.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

from rlpack.background_call import BackgroundCall

T = TypeVar("T")

# There are no other ranks to wait for.
_TIMEOUT = timedelta(seconds=10)
_DEADLINE_S = 3600.0


def call_on_fake_rank(rank: int, num_ranks: int, function: Callable[[], T]) -> T:
    """Return what a function returns on one rank of a process group; nothing is sent, and no other process exists.

    It runs in a separate thread, because DTensor caches process groups per thread, even after they are destroyed.

    Args:
        rank: this rank, from 0.
        num_ranks: size of the group.
        function: must not communicate values.

    Raises:
        TimeoutError: it has not returned within an hour.
    """

    def call() -> T:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
        try:
            return function()
        finally:
            dist.destroy_process_group()

    # On a machine without a GPU, PyTorch for CUDA installs a stand-in for the GPU with the first fake tensors of a
    # process. It is freed with their thread (PyTorch 2.11), and fake tensors in another thread crash the process.
    with FakeTensorMode():
        pass
    running = BackgroundCall(call, name="fake-rank")
    if not running.wait(_DEADLINE_S):
        raise TimeoutError(f"a simulated rank has not finished within {_DEADLINE_S:g} s")
    return running.outcome()
