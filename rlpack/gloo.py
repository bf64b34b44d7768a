"""A gloo backend whose groups run one collective at a time.

PyTorch's gloo groups run collectives on two threads. Each thread assigns the name of the collective that it completed
to one string, without a lock (`ProcessGroupGloo::runLoop`, torch 2.11 to 2.13). If both names are longer than the 15
characters that a string holds itself, as `ALLGATHER_COALESCED` of a functional all-gather, both threads can free the
same memory; the process crashes in malloc, then or later. A group with one thread has no such race. It starts
collectives in the same order, so results are the same; collectives of one group don't overlap.
`benchmarks/gloo_threads.py` repeats the crash.
"""

import os
from datetime import timedelta
from typing import Any, cast

from torch.distributed import Backend, ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

GLOO = "gloo_one_thread"


def _new_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Make a gloo group as torch does, with one thread."""
    options = cast(Any, ProcessGroupGloo)._Options()
    options._timeout, options._threads = timeout, 1
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    return ProcessGroupGloo(store, rank, size, options)


Backend.register_backend(GLOO, _new_group, devices=["cpu"])
