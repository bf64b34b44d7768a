"""Hostile functions that want more of the kernel, or become other programs."""

import ctypes
import errno
import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import rlpack
from tests.unit.rewards.hostile_tools import Breach, refused, system_call


def has_privileges(files):
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    held = {name: status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(status[name], 16)}
    if os.geteuid() == 0 and int(status["CapBnd"], 16):
        held["CapBnd"] = status["CapBnd"]
    if held or status["NoNewPrivs"] != "1":
        raise Breach(f"{held} {status['NoNewPrivs']}")


def changes_kernel_settings(files):
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/modprobe", "/etc/shadow",
                 "/etc/ld.so.preload", "/etc/passwd", "/sys/kernel/uevent_helper",
                 "/sys/fs/cgroup/memory/release_agent",
                 "/usr/bin/env"):  # fmt: skip
        refused(lambda path=path: os.open(path, os.O_WRONLY), path)
    for path in ("/proc/kcore", "/proc/kallsyms", "/proc/keys", "/proc/1/environ"):
        refused(lambda path=path: os.open(path, os.O_RDONLY), path)


def leaves_its_namespaces(files):
    for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000):  # user, mounts, processes, network, IPC
        refused(lambda flag=flag: system_call("unshare", flag), f"unshare {flag:#x}")
        refused(lambda flag=flag: system_call("clone", flag | signal.SIGCHLD, 0, 0, 0, 0), f"clone {flag:#x}")
    refused(lambda: system_call("clone3", bytes(88), 88), "clone3")
    refused(lambda: system_call("mount", b"none", b"/tmp", b"tmpfs", 0, 0), "mount")
    refused(lambda: system_call("fsopen", b"tmpfs", 0), "fsopen")
    refused(lambda: system_call("open_tree", -100, b"/", 1), "open_tree")
    refused(lambda: os.chroot("."), "chroot")


def asks_the_kernel(files):
    ring = ctypes.create_string_buffer(120)
    attempts = {
        "io_uring_setup": (4, ring), "userfaultfd": (1,), "bpf": (0, bytes(48), 48),
        "kcmp": (files["driver"], 1, 0, 0, 0),
        "perf_event_open": (bytes(112), files["driver"], -1, -1, 0), "add_key": (b"user", b"a", b"b", 1, -3),
        "keyctl": (0, -3, 0, 0, 0), "syslog": (3, ring, 16), "swapon": (b"x", 0), "fanotify_init": (0, 0),
        "settimeofday": (bytes(16), None),
    }  # fmt: skip
    for name, arguments in attempts.items():
        try:
            system_call(name, *arguments)
        except OSError as error:
            if error.errno != errno.EPERM:
                raise Breach(f"{name} got past the filter: {error}") from error
        else:
            raise Breach(name)


def shares_memory_with_others(files):
    create = 0o1600
    attempts = {"shmget": (0, 4096, create), "semget": (0, 1, create), "msgget": (0, create)}
    for name, arguments in attempts.items():
        refused(lambda name=name, arguments=arguments: system_call(name, *arguments), name)
    refused(lambda: system_call("mq_open", b"rlpack-test", os.O_CREAT | os.O_RDWR, 0o600, None), "mq_open")


def spares_itself_when_memory_runs_out(files):
    refused(lambda: Path("/proc/self/oom_score_adj").write_text("-1000"), "oom_score_adj")


def changes_what_is_installed(files):
    """Code and startup files that trusted processes run later."""
    folders = [os.path.dirname(os.__file__), os.path.dirname(fcntl.__file__), os.path.dirname(rlpack.__file__)]
    for folder in (*folders, *(path for path in sys.path if path.endswith("site-packages"))):
        path = Path(folder, "rlpack_test.pth")
        refused(lambda path=path: (path.touch(), path.unlink()), folder)
    refused(lambda: os.open(rlpack.__file__, os.O_WRONLY), rlpack.__file__)
    home = Path(files["home"])
    for name in (".bashrc", ".profile", ".zshenv"):
        refused(lambda name=name: (home / name).write_text("x"), name)


def locks_and_flags_files_outside(files):
    """Refused by `strict` alone, like all other changes."""
    with open(files["outside"]) as file:
        attempts = {
            "flock": lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
            "lease": lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
            "flags": lambda: fcntl.ioctl(file, 0x40086602, struct.pack("l", 0)),
            "extended flags": lambda: fcntl.ioctl(file, 0x401C5820, bytes(28)),
            "version": lambda: fcntl.ioctl(file, 0x40087602, struct.pack("l", 1)),
        }
        for name, attempt in attempts.items():
            if not files["strict"]:
                continue
            try:
                attempt()
            except PermissionError:
                continue
            except OSError as error:
                raise Breach(f"{name} got past the filter: {error}") from error
            raise Breach(name)


def raises_its_limits(files):
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        try:
            resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except (ValueError, OSError):
            continue
        raise Breach(f"limit {kind}")


def changes_files_outside(files):
    """Modes, times and attributes are refused by `strict` alone."""
    path = files["outside"]
    attempts = {
        "write": lambda: Path(path).write_text("x"),
        "chmod": lambda: os.chmod(path, 0o777),
        "fchmod": lambda: os.fchmod(os.open(path, os.O_RDONLY), 0o777),
        "chown": lambda: os.chown(path, os.getuid(), os.getgid()),
        "utime": lambda: os.utime(path, (1, 1)),
        "setxattr": lambda: os.setxattr(path, "user.x", b"1"),
        "truncate": lambda: os.truncate(path, 0),
        "remove": lambda: os.remove(path),
    }
    for name, attempt in attempts.items():
        if files["strict"] or name in ("write", "truncate", "remove"):
            refused(attempt, name)


def becomes_a_daemon(files):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)


def starts_the_command(files):
    subprocess.run([sys.executable, "-m", "rlpack", "--help"], check=True)


def becomes_another_program(files):
    os.execv("/bin/sleep", ["sleep", "60"])


def becomes_a_program_in_memory(files):
    refused(lambda: system_call("memfd_create", b"x", 0), "memfd_create")
    with open(os.open("x", os.O_CREAT | os.O_WRONLY, 0o700), "wb") as file:
        file.write(Path("/bin/sleep").read_bytes())
    descriptor = os.open("x", os.O_RDONLY)
    os.unlink("x")
    os.execve(descriptor, ["sleep", "60"], {})


def faults(files):
    ctypes.string_at(0)


def aborts(files):
    os.abort()


def overflows_the_stack(files):
    sys.setrecursionlimit(1 << 30)

    def deeper():
        return max([1], key=lambda _: deeper())

    deeper()


def recurses(files):
    return recurses(files)
