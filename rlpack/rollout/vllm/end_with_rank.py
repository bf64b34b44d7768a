"""End vLLM's processes with the rank that started them, on Linux; vLLM itself doesn't watch the rank.

On one device, the rank is the parent of the process with the model (EngineCore). On several, it is the grandparent:
EngineCore starts a worker for each GPU, and only workers import this module.

Invariant (tests/unit/rollout/vllm/test_end_with_rank.py): however the rank ends, all of them end and free their memory,
so that the pool can be started again.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from contextlib import suppress

# Environment variable of vLLM's processes with the process id of the rank.
RANK_VARIABLE = "RLPACK_RANK_PID"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_rank() -> None:
    """Have this process killed when its parent or the rank ends; when the rank ends, its parent is killed as well.

    No effect in the main process and on other systems than Linux.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent.pid:  # it has ended already
        os._exit(1)
    rank = int(os.environ[RANK_VARIABLE])
    if rank != parent.pid:
        threading.Thread(target=_kill_after, args=(rank, parent.pid), name="rlpack-rank", daemon=True).start()


def _kill_after(rank: int, parent: int) -> None:
    """Wait until the rank ends, then kill the parent, with which this process ends, too."""
    with suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(rank)
        select.select([descriptor], [], [])
    os.kill(parent, signal.SIGKILL)
