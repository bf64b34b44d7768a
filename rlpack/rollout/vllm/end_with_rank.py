"""End vLLM's processes with the rank that started them, on Linux; vLLM itself doesn't watch the rank.

On one device, the rank is the parent of the process with the model (EngineCore). On several, it is the grandparent:
EngineCore starts a worker for each GPU, and only workers import this module.

Invariant (tests/unit/rollout/vllm/test_end_with_rank.py): however the rank ends, all of them end and free their memory,
so that the pool can be started again.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import wait

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
    rank = int(os.environ[RANK_VARIABLE])
    if rank == parent.pid:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent.pid:  # it has ended already
            os._exit(1)
    else:
        # Not PR_SET_PDEATHSIG: it acts when the thread that started this process ends, and vLLM 0.33 starts workers
        # from short-lived threads.
        threading.Thread(target=_end_after, args=(rank, parent.pid), name="rlpack-rank", daemon=True).start()


def _end_after(rank: int, parent: int) -> None:
    """Wait until the rank or the parent ends, then kill the parent and this process."""
    with suppress(ProcessLookupError):  # the parent has ended already
        parent_descriptor = os.pidfd_open(parent)
        if os.getppid() == parent:  # else its id may be another process's by now
            with suppress(ProcessLookupError):  # the rank has ended already
                wait([os.pidfd_open(rank), parent_descriptor])
            signal.pidfd_send_signal(parent_descriptor, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
