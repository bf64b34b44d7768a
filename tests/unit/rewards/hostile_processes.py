"""Hostile functions that attack other processes: their memory, files, limits and signals."""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path

from tests.unit.rewards.hostile_tools import SECRET, Breach, others, refused, search, system_call


def reads_every_environment(files):
    search("environ")


def reads_every_environment_by_thread(files):
    for pid in others():
        with suppress(OSError):
            if SECRET in Path(f"/proc/{pid}/task/{pid}/environ").read_text(errors="replace"):
                raise Breach(f"environment of {pid}")


def reads_every_command_line(files):
    search("cmdline")


def opens_every_memory(files):
    search("mem", is_secret=False)


def opens_every_map(files):
    for name in ("maps", "smaps", "auxv", "io", "stack", "syscall", "pagemap", "status"):
        search(name, is_secret=False)


def follows_every_link(files):
    for pid in others():
        for name in ("cwd", "root", "exe"):
            refused(lambda name=name, pid=pid: os.listdir(f"/proc/{pid}/{name}/"), f"/proc/{pid}/{name}")
            refused(lambda name=name, pid=pid: os.readlink(f"/proc/{pid}/{name}"), f"link /proc/{pid}/{name}")


def lists_every_descriptor(files):
    for pid in others():
        refused(lambda pid=pid: os.listdir(f"/proc/{pid}/fd"), f"descriptors of {pid}")


def opens_descriptors_of_its_parents(files):
    for pid in (os.getppid(), files["driver"]):
        for number in range(32):
            refused(lambda pid=pid, number=number: os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY), f"{pid}: {number}")


def traces_its_parents(files):
    for pid in (os.getppid(), files["driver"]):
        for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
            refused(lambda pid=pid, request=request: system_call("ptrace", request, pid, 0, 0), f"ptrace {pid}")


def reads_the_memory_of_its_parents(files):
    buffer = ctypes.create_string_buffer(8)
    local = struct.pack("QQ", ctypes.addressof(buffer), 8)
    remote = struct.pack("QQ", id(None), 8)
    for pid in (os.getppid(), files["driver"]):
        refused(lambda pid=pid: system_call("process_vm_readv", pid, local, 1, remote, 1, 0), f"memory of {pid}")


def takes_descriptors_of_its_parents(files):
    for pid in (os.getppid(), files["driver"]):
        descriptor = system_call("pidfd_open", pid, 0)
        for number in range(16):
            refused(lambda d=descriptor, n=number: system_call("pidfd_getfd", d, n, 0), f"descriptor {number} of {pid}")
        refused(lambda d=descriptor: system_call("setns", d, 0x20000), f"mounts of {pid}")
        refused(
            lambda d=descriptor: system_call("process_madvise", d, struct.pack("QQ", 4096, 4096), 1, 21, 0), "madvise"
        )
        refused(lambda d=descriptor: system_call("pidfd_send_signal", d, 0, 0, 0), f"signal to {pid}")


def signals_everyone(files):
    os.kill(-1, signal.SIGURG)  # harmless, and no error if nobody could be signalled
    for pid in (os.getppid(), files["driver"]):
        for number in (0, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
            refused(lambda pid=pid, number=number: os.kill(pid, number), f"signal {number} to {pid}")
        refused(lambda pid=pid: os.killpg(pid, 0), f"group {pid}")
        refused(lambda pid=pid: signal.pidfd_send_signal(os.pidfd_open(pid), 0), f"pidfd {pid}")


def signals_by_a_socket(files):
    """Have the kernel send SIGKILL to the driver when a socket becomes readable."""
    ours, theirs = socket.socketpair()
    for pid in (files["driver"], os.getppid()):
        with suppress(OSError):
            fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
            fcntl.fcntl(ours, 10, signal.SIGKILL)  # F_SETSIG
            fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
            theirs.sendall(b"x")


def limits_its_parents(files):
    for pid in (os.getppid(), files["driver"]):
        for kind in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
            refused(lambda pid=pid, kind=kind: resource.prlimit(pid, kind, (1, 1)), f"limits of {pid}")


def slows_its_parents(files):
    for pid in (os.getppid(), files["driver"]):
        refused(lambda pid=pid: os.setpriority(os.PRIO_PROCESS, pid, 19), f"priority of {pid}")
        refused(lambda pid=pid: os.sched_setaffinity(pid, {0}), f"affinity of {pid}")
        refused(lambda pid=pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)), f"scheduler of {pid}")
    refused(lambda: os.setpriority(os.PRIO_USER, 0, 19), "priority of the user's processes")
