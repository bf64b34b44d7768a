"""The seccomp filter of the processes that run user code: which system calls fail, and with what error.

A filter sees a call's number and its arguments, not the memory they point to. Calls that can't be judged by their
arguments are therefore refused as a whole. The numbers are those of asm/unistd.h, linux/seccomp.h and linux/filter.h.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PR_SET_SECCOMP, _FILTER_MODE = 22, 2
_LOAD, _JUMP, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x05, 0x15, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000  # flags a second set of system calls on x86_64, which would bypass the numbers below
_CLONE_THREAD, _CLONE_NAMESPACES = 0x00010000, 0x7E020000
_AF_INET, _AF_INET6, _AF_NETLINK = 2, 10, 16
_SOCK_STREAM, _SOCK_CLOEXEC, _SOCK_NONBLOCK = 1, 0x80000, 0x800
_F_SETOWN, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 15, 0x8901, 0x8902
_F_SETLEASE = 1024
# These change a file through a read-only descriptor: flags, extended flags and version (of 64 and 32 bits), verity, and
# encryption.
_FILE_IOCTLS = (
    0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40047602, 0x40086604, 0x40046604, 0x40806685, 0x800C6613,
    0xC0506617, 0xC0406618,
)  # fmt: skip
_WHO_PROCESS, _IO_WHO_PROCESS = 0, 1

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name -> number on x86_64 and on aarch64 (None: there is no such call); calls from 424 on have one number everywhere
_NUMBERS: dict[str, tuple[int, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "chmod": (90, None), "chown": (92, None),
    "chroot": (161, 51), "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54), "fcntl": (72, 25), "file_setattr": (469, 469),
    "finit_module": (313, 273), "fork": (57, None), "fremovexattr": (199, 16), "fsconfig": (431, 431),
    "fsetxattr": (190, 7), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433), "futimesat": (261, None),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, None), "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "kill": (62, 129), "lchown": (94, None), "lremovexattr": (198, 15), "lsetxattr": (189, 6),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "pivot_root": (155, 41),
    "prlimit64": (302, 261), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "removexattr": (197, 14), "removexattrat": (466, 466),
    "request_key": (249, 218), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "setpgid": (109, 154), "setpriority": (141, 140), "setsid": (112, 157), "settimeofday": (164, 170),
    "setxattr": (188, 5), "setxattrat": (463, 463), "socket": (41, 198), "socketpair": (53, 199),
    "flock": (73, 32), "mq_open": (240, 180), "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186),
    "msgrcv": (70, 188), "msgsnd": (69, 189), "semctl": (66, 191), "semget": (64, 190), "semop": (65, 193),
    "semtimedop": (220, 192), "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194),
    "swapoff": (168, 225), "swapon": (167, 224),
    "syslog": (103, 116), "tgkill": (234, 131), "tkill": (200, 130), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "utime": (132, None), "utimensat": (280, 88), "utimes": (235, None), "vfork": (58, None),
}  # fmt: skip

# Calls that no reward function needs: other processes' memory and descriptors, their segments, semaphores and queues,
# namespaces and mounts, keys, kernel interfaces, and io_uring, whose operations bypass filters.
_NEVER = (
    "acct", "add_key", "bpf", "chroot", "clock_settime", "delete_module", "fanotify_init", "finit_module",
    "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "io_uring_enter", "io_uring_register",
    "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "memfd_secret",
    "migrate_pages", "mount", "mount_setattr", "move_mount", "move_pages", "mq_open", "mq_unlink", "msgctl", "msgget",
    "msgrcv", "msgsnd",
    "open_by_handle_at", "open_tree", "open_tree_attr", "perf_event_open", "pidfd_getfd", "pivot_root",
    "process_madvise", "process_mrelease", "process_vm_readv", "process_vm_writev", "ptrace", "quotactl",
    "quotactl_fd", "reboot", "request_key", "semctl", "semget", "semop", "semtimedop", "setdomainname",
    "sethostname", "setns", "settimeofday", "shmat", "shmctl", "shmget", "swapoff", "swapon", "syslog", "umount2",
    "unshare", "userfaultfd",
)  # fmt: skip
# `strict` also refuses the network, leaving the process group, locks that others wait for, and changes to files that
# Landlock doesn't cover. A filter can't see a path, so these also fail in the scratch directory.
_STRICT = (
    "socket", "setsid", "setpgid", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown",
    "fchownat", "utime", "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    "removexattr", "lremovexattr", "fremovexattr", "removexattrat", "file_setattr", "flock",
)  # fmt: skip

# Pairs of other types can be connected to another process.
_STREAM_PAIRS = tuple(
    _SOCK_STREAM | cloexec | nonblock for cloexec in (0, _SOCK_CLOEXEC) for nonblock in (0, _SOCK_NONBLOCK)
)
# Calls whose first argument is a process, 0 for the caller.
_OF_ONE_PROCESS = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")

_Line = tuple[int, int, int, int]


class SeccompError(RuntimeError):
    """The filter can't be installed; the message says why."""


@dataclass(frozen=True)
class _Check:
    """A condition on an argument of a call.

    Attributes:
        argument: its index.
        values: the values that are allowed, or refused.
        refused: whether `values` are those refused.
    """

    argument: int
    values: tuple[int, ...]
    refused: bool = False


def is_supported() -> bool:
    """Whether the filter knows this machine's system calls."""
    return platform.machine() in _ARCHITECTURES


def filter_calls(*, strict: bool, processes: bool, signals: bool) -> None:
    """Install the filter for this process and its descendants.

    Args:
        strict: refuse what `sandbox=strict` refuses.
        processes: allow new processes; without it, only threads can be created.
        signals: leave signals to other processes alone, since Landlock refuses them.

    Raises:
        SeccompError: this machine or kernel doesn't support it.
    """
    if not is_supported():
        raise SeccompError(
            f"the filter doesn't support {platform.machine()}; supported are {', '.join(_ARCHITECTURES)}"
        )
    code = _program(platform.machine(), strict=strict, processes=processes, signals=signals)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    header = ctypes.create_string_buffer(struct.pack("=H6xQ", len(code), ctypes.addressof(program)))
    libc, zero = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), header, zero, zero) != 0:
        raise SeccompError(f"the kernel refused the seccomp filter: {os.strerror(ctypes.get_errno())}")


def _program(machine: str, *, strict: bool, processes: bool, signals: bool) -> list[_Line]:
    code: list[_Line] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_JUMP_SET, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    refused = [*_NEVER, *(_STRICT if strict else ()), *(() if processes else ("fork", "vfork"))]
    numbers = {name: pair[machine == "aarch64"] for name, pair in _NUMBERS.items()}
    for name in refused:
        code += _call(numbers[name], [(_RETURN, 0, 0, _FAIL | errno.EPERM)])
    # Its files are in memory, which no limit counts; libraries fall back to files on disk.
    code += _call(numbers["memfd_create"], [(_RETURN, 0, 0, _FAIL | errno.ENOSYS)])
    # The flags of clone3 are in memory, which a filter can't read; if it fails, libc falls back to clone.
    code += _call(numbers["clone3"], [(_RETURN, 0, 0, _FAIL | errno.ENOSYS)])
    only_threads: list[_Line] = [(_JUMP_SET, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    code += _call(
        numbers["clone"],
        [
            (_LOAD, 0, 0, 16),
            (_JUMP_SET, 0, 1, _CLONE_NAMESPACES),
            (_RETURN, 0, 0, _FAIL | errno.EPERM),
            *(() if processes else only_threads),
            (_RETURN, 0, 0, _ALLOW),
        ],
    )
    if not strict:  # local sockets lead to Ray's object store, to container daemons and to key agents
        code += _checked(numbers["socket"], [_Check(0, (_AF_INET, _AF_INET6, _AF_NETLINK))], errno.EAFNOSUPPORT)
    code += _checked(numbers["socketpair"], [_Check(1, _STREAM_PAIRS)], errno.EPERM)
    for name, checks in _checks(strict=strict, signals=signals, processes=processes).items():
        code += _checked(numbers[name], checks, errno.EPERM)
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _own_process_only(*, signals: bool, processes: bool) -> dict[str, Sequence[_Check]]:
    """Return the calls that may only target this process, because they could cripple another one of the same user."""
    own = _Check(0, (0, os.getpid()))
    checks: dict[str, Sequence[_Check]] = {
        **{name: [own] for name in _OF_ONE_PROCESS},
        "setpriority": [_Check(0, (_WHO_PROCESS,)), _Check(1, (0, os.getpid()))],
        "ioprio_set": [_Check(0, (_IO_WHO_PROCESS,)), _Check(1, (0, os.getpid()))],
    }
    if signals or processes:
        return checks
    return checks | {
        **{name: [own] for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")},
        **{name: [_Check(0, ())] for name in ("tkill", "pidfd_send_signal")},
        "fcntl": [_Check(1, (_F_SETOWN, _F_SETOWN_EX), refused=True)],
        "ioctl": [_Check(1, (_FIOSETOWN, _SIOCSPGRP), refused=True)],
    }


def _checks(*, strict: bool, signals: bool, processes: bool) -> dict[str, Sequence[_Check]]:
    """Return the checks of arguments by call."""
    checks = _own_process_only(signals=signals, processes=processes)
    if not strict:
        return checks
    refused = {"fcntl": (_F_SETLEASE,), "ioctl": _FILE_IOCTLS}
    return checks | {name: [*checks.get(name, ()), _Check(1, values, refused=True)] for name, values in refused.items()}


def _checked(number: int | None, checks: Iterable[_Check], error: int) -> list[_Line]:
    """Return code that lets a call fail with `error` unless all checks of its arguments pass."""
    lines: list[_Line] = []
    for check in checks:
        lines.append((_LOAD, 0, 0, 16 + 8 * check.argument))
        count = len(check.values)
        # A value that matches jumps over the others: to the next check if it is allowed, to the failure if refused.
        lines += [(_JUMP_EQUAL, count - index, 0, value) for index, value in enumerate(check.values)]
        lines += [(_JUMP, 0, 0, 1)] if check.refused else []
        lines.append((_RETURN, 0, 0, _FAIL | error))
    return _call(number, [*lines, (_RETURN, 0, 0, _ALLOW)])


def _call(number: int | None, lines: list[_Line]) -> list[_Line]:
    """Return code that runs `lines` for one system call, which must end with a return."""
    return [] if number is None else [(_JUMP_EQUAL, 0, len(lines), number), *lines]
