"""Permanently confine a process: no network, no writes outside its scratch directory, no signals to other processes.

The confinement uses two unprivileged mechanisms of the Linux kernel that containers leave enabled: Landlock (files,
signals, other processes' memory and environment) and a seccomp filter (sockets, process groups, new processes). Every
descendant inherits it, and it can't be lifted. `python -m rlpack.rewards.pool.sandbox` tests it on this machine and
prints what fails, if anything.

Landlock: https://docs.kernel.org/userspace-api/landlock.html; the numbers are those of linux/landlock.h,
linux/seccomp.h and linux/filter.h.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 36, 38
_SIGKILL = 9

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _TRUNCATE, _MAKE_CHAR = 1 << 1, 1 << 14, 1 << 6
# write, remove (2), make (7), refer, truncate
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13)) | 1 << 13 | _TRUNCATE
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_ABI_TRUNCATE, _ABI_SCOPES = 3, 6

_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_CLONE_THREAD = 0x00010000
# machine -> (audit architecture, system call numbers)
_CALLS = {
    "x86_64": (
        0xC000003E,
        {"socket": 41, "io_uring_setup": 425, "setsid": 112, "setpgid": 109, "fork": 57, "vfork": 58, "clone": 56,
         "clone3": 435},
    ),
    "aarch64": (
        0xC00000B7,
        {"socket": 198, "io_uring_setup": 425, "setsid": 157, "setpgid": 154, "clone": 220, "clone3": 435},
    ),
}  # fmt: skip
_X32 = 0x40000000  # flags a second set of system calls on x86_64, which would bypass the numbers above
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _CAP_SYS_PTRACE, _CAP_SYS_RESOURCE = 1, 2, 19, 24
_CAPABILITY_VERSION = 0x20080522

_TEST_TIMEOUT_S = 20.0


class SandboxError(RuntimeError):
    """The kernel doesn't support the confinement; the message says which part."""


def is_linux() -> bool:
    """Whether this module can confine anything."""
    return sys.platform == "linux"


def landlock_version() -> int:
    """Return the kernel's Landlock ABI version, 0 for none."""
    if not is_linux():
        return 0
    version = _libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, version)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    if is_linux():
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def adopt_orphans() -> None:
    """Make this process a subreaper: the new parent of all its orphaned descendants."""
    if is_linux():
        _prctl(_PR_SET_SUBREAPER, 1)


def confine(scratch: Path, *, strict: bool, processes: bool) -> None:
    """Permanently drop the rights of this process and its descendants.

    Args:
        scratch: the only directory that stays writable with `strict`.
        strict: close the network and refuse writes elsewhere. Without it, and as far as the kernel allows, drop only
            rights that no reward function needs: to raise limits, and to read or signal other processes.
        processes: allow new processes; `strict` keeps them in this process's group.

    Raises:
        SandboxError: the kernel can't provide what `strict` promises.
    """
    if not is_linux():
        if strict:
            raise SandboxError(f"the strict sandbox needs Linux; this is {sys.platform}")
        return
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _drop_capabilities(strict=strict)
    version = landlock_version()
    if strict and version < _ABI_TRUNCATE:
        raise SandboxError(
            f"the kernel has Landlock version {version}; the strict sandbox needs 3 or newer (Linux 6.2)"
        )
    if version:
        _restrict_files(scratch if strict else None, version)
    denied = ["socket", "io_uring_setup", "setsid", "setpgid"] if strict else []
    machine = platform.machine()
    if machine in _CALLS:
        _filter_calls(machine, denied, processes=processes)
    elif strict:
        raise SandboxError(f"the seccomp filter doesn't support {machine}; supported are {', '.join(_CALLS)}")


def why_not_strict() -> str | None:
    """Return why this machine can't confine strictly, None if it can, by a test in a separate process."""
    command = [sys.executable, "-P", "-m", "rlpack.rewards.pool.sandbox"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        test = subprocess.run(command, capture_output=True, text=True, timeout=_TEST_TIMEOUT_S, env=env, check=False)
    except subprocess.TimeoutExpired:
        return f"a test of it did not finish within {_TEST_TIMEOUT_S:g} s"
    output = (test.stderr.strip() or test.stdout.strip()).splitlines()
    return None if test.returncode == 0 else (output or ["a test of it crashed"])[-1]


def broken_promises(scratch: Path, outside: Path) -> list[str]:
    """Return which promises of `strict` this confined process can still break."""
    broken = []
    try:
        socket.socket(socket.AF_INET).close()
        broken.append("a socket could be opened")
    except OSError:
        pass
    try:
        (outside / "written").write_text("x")
        broken.append(f"a file could be written outside {scratch}")
    except OSError:
        pass
    return broken


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int, *, needed: bool = True) -> None:
    zero = ctypes.c_ulong(0)
    if _libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0 and needed:
        raise SandboxError(f"prctl({option}, {value}) failed: {os.strerror(ctypes.get_errno())}")


def _drop_capabilities(*, strict: bool) -> None:
    """Drop root's capabilities to raise limits and to read other processes.

    Dropping them from the bounding set keeps programs that root starts from regaining them.
    """
    retained = (
        {_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH} if strict else set(range(64)) - {_CAP_SYS_PTRACE, _CAP_SYS_RESOURCE}
    )
    for capability in set(range(41)) - retained:
        _prctl(_PR_CAPBSET_DROP, capability, needed=False)  # fails without CAP_SETPCAP, when there is nothing to drop
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    data = ctypes.create_string_buffer(24)
    if _libc().capget(header, data) != 0:
        raise SandboxError(f"capget failed: {os.strerror(ctypes.get_errno())}")
    mask = sum(1 << capability for capability in retained)
    words = struct.unpack("=6I", data.raw)
    limited = [word & (mask >> (32 * (index // 3))) & 0xFFFFFFFF for index, word in enumerate(words)]
    if _libc().capset(header, ctypes.create_string_buffer(struct.pack("=6I", *limited), 24)) != 0:
        raise SandboxError(f"capset failed: {os.strerror(ctypes.get_errno())}")


def _restrict_files(scratch: Path | None, version: int) -> None:
    """Enter a Landlock domain that refuses writes outside `scratch`.

    Without `scratch` the domain refuses only the creation of device nodes.

    A process in a domain can't read the memory or environment of processes outside it and, from version 6 on, can't
    signal them.
    """
    handled = _WRITES if scratch else _MAKE_CHAR
    scoped = (_SCOPE_SIGNALS | (_SCOPE_ABSTRACT_SOCKETS if scratch else 0)) if version >= _ABI_SCOPES else 0
    attributes = struct.pack("=QQQ", handled, 0, scoped)
    size = 24 if version >= _ABI_SCOPES else 8
    libc = _libc()
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    if ruleset < 0:
        raise SandboxError(f"Landlock refused the ruleset: {os.strerror(ctypes.get_errno())}")
    try:
        if scratch:
            _allow(libc, ruleset, scratch, _WRITES)
            _allow(libc, ruleset, Path(os.devnull), _WRITE_FILE | _TRUNCATE)
        if libc.syscall(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)) != 0:
            raise SandboxError(f"Landlock could not be enabled: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        if libc.syscall(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0)) != 0:
            raise SandboxError(f"Landlock refused the rule for {path}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def _filter_calls(machine: str, denied: Iterable[str], *, processes: bool) -> None:
    """Install a seccomp filter that makes the `denied` calls fail.

    Denied system calls fail with EPERM; so do calls that create processes, unless `processes` is set.
    """
    architecture, numbers = _CALLS[machine]
    code = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_JUMP_SET, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for name in [*denied, *([] if processes else ["fork", "vfork"])]:
        if name in numbers:
            code += [(_JUMP_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    if not processes:
        # The flags of clone3 are in memory, which a filter can't read; if it fails, libc falls back to clone.
        code += [(_JUMP_EQUAL, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
        code += [
            (_JUMP_EQUAL, 0, 4, numbers["clone"]),
            (_LOAD, 0, 0, 16),
            (_JUMP_SET, 1, 0, _CLONE_THREAD),
            (_RETURN, 0, 0, _FAIL | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    header = ctypes.create_string_buffer(struct.pack("=H6xQ", len(code), ctypes.addressof(program)))
    filter_mode, zero = 2, ctypes.c_ulong(0)
    if _libc().prctl(_PR_SET_SECCOMP, ctypes.c_ulong(filter_mode), header, zero, zero) != 0:
        raise SandboxError(f"the kernel refused the seccomp filter: {os.strerror(ctypes.get_errno())}")


def _self_test() -> None:
    """Confine a process, and print which promises don't hold."""
    with tempfile.TemporaryDirectory() as outside, tempfile.TemporaryDirectory() as scratch:
        child = os.fork()
        if child == 0:
            try:
                confine(Path(scratch), strict=True, processes=False)
                (Path(scratch) / "written").write_text("x")
                problems = broken_promises(Path(scratch), Path(outside))
            except (SandboxError, OSError) as error:
                problems = [str(error)]
            sys.stderr.write("".join(f"{problem}\n" for problem in problems))
            sys.stderr.flush()
            os._exit(len(problems))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(0 if status == 0 else 1)


if __name__ == "__main__":
    _self_test()
