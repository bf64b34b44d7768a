"""Permanently confine a process that runs user code: no capabilities, no other processes, no credentials.

It can write only to its scratch directory. With `strict` it also has no network and can't change the modes and times of
files, or lock them.

The confinement uses two unprivileged mechanisms of the Linux kernel that containers leave enabled: Landlock (files,
signals, other processes) and a seccomp filter (system calls). Every descendant inherits it, and it can't be lifted.
`python -m rlpack.rewards.pool.sandbox` tests it on this machine and prints what fails, if anything.
"""

import ctypes
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlpack.rewards.pool import landlock, seccomp
from rlpack.rewards.pool.landlock import import_paths

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 36, 38, 47
_CAP_AMBIENT_CLEAR_ALL = 4
_SIGKILL = 9
_CAPABILITY_VERSION = 0x20080522
_NUM_CAPABILITIES = 64
_CAP_DAC_READ_SEARCH = 1 << 2

_TEST_TIMEOUT_S = 20.0


class SandboxError(RuntimeError):
    """The kernel doesn't support the confinement; the message says which part."""


def is_linux() -> bool:
    """Return whether this module can confine anything."""
    return sys.platform == "linux"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    if is_linux():
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def adopt_orphans() -> None:
    """Make this process a subreaper: the new parent of all its orphaned descendants."""
    if is_linux():
        _prctl(_PR_SET_SUBREAPER, 1)


def confine(scratch: Path, *, strict: bool, processes: bool, hidden: Sequence[Path] | None = None) -> None:
    """Permanently drop the rights of this process and its descendants.

    Args:
        scratch: its own directory, the only writable one; with `processes` and without `strict`, /dev/shm is, too.
        strict: block the network, and changes to modes, owners, times and locks of files, also in `scratch`.
        processes: allow new processes; `strict` keeps them in this process's group.
        hidden: paths that it can't read, existing or not. Other processes, devices and what `hidden_paths` lists are
            hidden with them. None leaves reading unrestricted.

    Raises:
        SandboxError: the kernel can't provide what `strict` promises. Without `strict`, `unenforced` says what it
            can't provide.
    """
    if strict and (missing := unenforced(processes=processes)):
        raise SandboxError(f"reward functions could {'; '.join(missing)}")
    if not is_linux():
        return
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _drop_capabilities()
    version = landlock.abi_version()
    try:
        if version:
            shared = processes and not strict  # semaphores of multiprocessing
            landlock.restrict(landlock.Reach(scratch, hidden, shared_memory=shared), version)
        if seccomp.is_supported():
            signals = version >= landlock.ABI_SCOPES
            seccomp.filter_calls(strict=strict, processes=processes, signals=signals)
    except (landlock.LandlockError, seccomp.SeccompError) as error:
        raise SandboxError(str(error)) from error


def unenforced(*, processes: bool, version: int | None = None) -> list[str]:
    """Return what confined processes could still do on this machine that they must not, and what would prevent it.

    Args:
        processes: whether they may start processes.
        version: the Landlock version, by default this kernel's.
    """
    if not is_linux():
        return [f"read and change whatever this user can (the sandbox needs Linux; this is {sys.platform})"]
    version = landlock.abi_version() if version is None else version
    missing: list[str] = []
    if not version:
        missing.append(
            "read credentials, the run directory, and the environment of other processes, and change files (needs "
            "Landlock, Linux 5.13)"
        )
    elif version < landlock.ABI_TRUNCATE:
        missing.append(f"truncate files (needs Landlock version 3, Linux 6.2; this kernel has {version})")
    if not seccomp.is_supported():
        names = " or ".join(("x86_64", "aarch64"))
        missing.append(
            f"call any part of the kernel (the filter of system calls needs {names}, not {platform.machine()})"
        )
    if version < landlock.ABI_SCOPES and (processes or not seccomp.is_supported()):
        missing.append("signal other processes (needs Landlock version 6, Linux 6.12, or reward.subprocesses=0)")
    return missing


def why_not_strict(*, processes: bool = False) -> str | None:
    """Return why this machine can't confine strictly, None if it can, by a test in a separate process."""
    if missing := unenforced(processes=processes):
        return f"reward functions could {'; '.join(missing)}"
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
    broken: list[str] = []
    with suppress(OSError):
        socket.socket(socket.AF_INET).close()
        broken.append("a socket could be opened")
    with suppress(OSError):
        (outside / "written").write_text("x")
        broken.append(f"a file could be written outside {scratch}")
    with suppress(OSError):
        outside.chmod(0o700)
        broken.append("the mode of a file could be changed")
    with suppress(OSError):
        Path(f"/proc/{os.getppid()}/environ").read_bytes()
        broken.append("the environment of another process could be read")
    return broken


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int, *, needed: bool = True) -> None:
    zero = ctypes.c_ulong(0)
    if _libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0 and needed:
        raise SandboxError(f"prctl({option}, {value}) failed: {os.strerror(ctypes.get_errno())}")


def _drop_capabilities() -> None:
    """Drop all capabilities of root, which leaves it the rights of a file owner, like any user.

    The capability to read other users' files is kept if Python imports from a directory that would otherwise be
    unreadable, such as the home of the user who became root. Dropping capabilities from the bounding set keeps programs
    from regaining them.
    """
    _prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL, needed=False)
    for capability in range(_NUM_CAPABILITIES):
        _prctl(_PR_CAPBSET_DROP, capability, needed=False)  # fails without CAP_SETPCAP, when there is nothing to drop
    if os.geteuid() == 0 and _set_capabilities(0, _CAP_DAC_READ_SEARCH) and any(map(_is_closed, import_paths())):
        _set_capabilities(_CAP_DAC_READ_SEARCH, _CAP_DAC_READ_SEARCH)
    elif not _set_capabilities(0, 0):
        raise SandboxError(f"capset failed: {os.strerror(ctypes.get_errno())}")


def _set_capabilities(effective: int, permitted: int) -> bool:
    """Set the capabilities of this process, as masks; return whether it had the permitted ones."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    return _libc().capset(header, struct.pack("=6I", effective, permitted, 0, 0, 0, 0)) == 0


def _is_closed(folder: Path) -> bool:
    try:
        os.listdir(folder)
    except PermissionError:
        return True
    except OSError:  # an archive, or nothing
        return False
    return False


def _self_test() -> None:
    """Confine a process, and print which promises don't hold."""
    with tempfile.TemporaryDirectory() as outside, tempfile.TemporaryDirectory() as scratch:
        child = os.fork()
        if child == 0:
            try:
                confine(Path(scratch), strict=True, processes=False, hidden=[Path(outside)])
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
