"""What hostile functions that attack the machine share: system calls, other processes, and the secret to find."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress

SECRET = "hu" + "sh-7391"  # in two parts, so that this file and the function's own memory don't count
LIBC = ctypes.CDLL(None, use_errno=True)
SYSTEM_CALLS = {
    "ptrace": 101, "process_vm_readv": 310, "pidfd_open": 434, "pidfd_getfd": 438, "kcmp": 312, "perf_event_open": 298,
    "bpf": 321, "userfaultfd": 323, "add_key": 248, "keyctl": 250, "io_uring_setup": 425, "unshare": 272, "setns": 308,
    "mount": 165, "chroot": 161, "clone": 56, "clone3": 435, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "pidfd_send_signal": 424, "setsid": 112, "open_tree": 428, "fsopen": 430, "memfd_create": 319,
    "sched_setattr": 314, "syslog": 103, "swapon": 167, "process_madvise": 440, "fanotify_init": 300,
    "settimeofday": 164, "utimensat": 280, "file_setattr": 469, "shmget": 29, "semget": 64, "msgget": 68,
    "mq_open": 240, "memfd_secret": 447,
}  # fmt: skip


class Breach(Exception):  # noqa: N818 - a word for the tests' tables
    """The function got what it must not have."""


def others() -> Iterator[int]:
    """Yield the process ids of other processes; where they can't be listed, all near this one."""
    try:
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        pids = {1, *range(max(1, os.getppid() - 200), os.getppid() + 200)}
    yield from sorted(pids - {os.getpid()})


def refused(attempt: Callable[[], object], what: str) -> None:
    """Raise `Breach` unless the attempt fails with an OSError."""
    try:
        attempt()
    except OSError:
        return
    raise Breach(what)


def system_call(name: str, *arguments: object) -> int:
    ctypes.set_errno(0)
    given = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = LIBC.syscall(ctypes.c_long(SYSTEM_CALLS[name]), *given)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def search(pattern: str, *, is_secret: bool = True) -> None:
    """Read a file of every other process."""
    for pid in others():
        for path in (f"/proc/{pid}/{pattern}", f"/proc/self/../{pid}/{pattern}"):
            with suppress(OSError), open(path, "rb") as file:
                if not is_secret or SECRET.encode() in file.read(1 << 20):
                    raise Breach(path)
