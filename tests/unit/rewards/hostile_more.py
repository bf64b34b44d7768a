"""Hostile functions that fill memory and disks by detours, reach for services, and change what the next call sees."""

import atexit
import builtins
import ctypes
import gc
import json
import locale
import mmap
import os
import resource
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.unit.rewards.hostile_tools import SECRET, Breach, others, refused, system_call

_CHUNK = b"x" * (1 << 20)


def fills_its_directory_with_many_files(files):
    for number in range(1 << 20):
        Path(f"file{number}").write_bytes(_CHUNK)


def _deleted_file(number):
    """Return a descriptor of a file of the largest size, without a name."""
    file = os.open(f"file{number}", os.O_CREAT | os.O_RDWR)
    os.unlink(f"file{number}")
    with suppress(OSError):
        while True:
            os.write(file, _CHUNK)
    return file


def fills_the_disk_with_deleted_files(files):
    for number in range(200):
        _deleted_file(number)
    time.sleep(60)


def fills_the_disk_with_deleted_files_that_are_only_mapped(files):
    libc, length = ctypes.CDLL(None), ctypes.c_size_t(mmap.PAGESIZE)
    for number in range(200):
        file = _deleted_file(number)
        libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(0))
        os.close(file)
    time.sleep(60)


def hides_files_in_a_closed_directory(files):
    os.mkdir("closed", 0o300)
    for number in range(1 << 20):
        Path("closed", f"file{number}").write_bytes(_CHUNK)


def makes_a_million_files(files):
    for number in range(1 << 20):
        os.close(os.open(f"file{number}", os.O_CREAT | os.O_WRONLY))


def fills_memory_with_files(files):
    for name, arguments in {"memfd_create": (b"x", 0), "memfd_secret": (0,)}.items():
        refused(lambda name=name, arguments=arguments: system_call(name, *arguments), name)
    refused(lambda: Path("/dev/shm/rlpack-test-filler").write_bytes(_CHUNK), "/dev/shm")


def writes_to_other_folders(files):
    home = Path(files["home"])
    for folder in (home, home.parent, Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path(files["outside"]).parent):
        refused(lambda folder=folder: (folder / "rlpack-test-new").write_text("x"), f"a file in {folder}")
        refused(lambda folder=folder: (folder / "rlpack-test-new").mkdir(), f"a folder in {folder}")
        refused(lambda folder=folder: (folder / "rlpack-test-new").symlink_to("x"), f"a link in {folder}")
        refused(lambda folder=folder: os.mkfifo(folder / "rlpack-test-new"), f"a FIFO in {folder}")


def moves_files_out(files):
    Path("mine").write_text("x")
    for action in (os.rename, os.link):
        refused(lambda action=action: action("mine", Path(files["home"]) / "mine"), action.__name__)
    refused(lambda: os.rename(files["outside"], "taken"), "taken")
    refused(lambda: os.link(files["outside"], "linked") or Path("linked").write_text("x"), "linked")


def connects_to_the_ports_of_this_machine(files):
    """Refused by `strict`; `limits` leaves the network open, but no server of ours without its token."""
    if files["strict"]:
        refused(lambda: socket.create_connection(("127.0.0.1", 6379), timeout=1), "TCP")
        refused(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM), "UDP")


def connects_to_every_local_socket(files):
    """Names can be listed, but nobody answers: Ray's daemons have such sockets."""
    names = {f"@{files['abstract']}", files["socket"]}
    with suppress(OSError):
        names |= {line.split()[-1] for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    for name in names - {"-"}:
        address = name.replace("@", "\0", 1) if name.startswith("@") else name
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            refused(lambda address=address, kind=kind: socket.socket(socket.AF_UNIX, kind).connect(address), name)


def dumps_its_core(files):
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except ValueError:
        os.kill(os.getpid(), signal.SIGQUIT)
        time.sleep(60)
    raise Breach("core files")


def forks_with_sessions(files):
    children = 0
    with suppress(OSError):
        while children < 50:
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
                os._exit(0)
            children += 1
    if children:
        raise Breach(f"{children} children")


def leaves_threads_that_ignore_it(files):
    for _ in range(8):
        threading.Thread(target=_for_ever, daemon=False).start()


def _for_ever():
    while True:
        with suppress(BaseException):
            time.sleep(0.001)


def sleeps_as_it_exits(files):
    atexit.register(time.sleep, 60)
    raise SystemExit(3)


def hooks_the_collector(files):
    gc.callbacks.append(lambda phase, info: time.sleep(60))
    gc.set_threshold(1)
    return [[] for _ in range(1000)] and 0.0


def recurses_in_c(files):
    json.dumps(_nested(), check_circular=False)


def _nested():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


def prints_a_gigabyte(files):
    line = "x" * (1 << 20) + "\n"
    for _ in range(1 << 10):
        os.write(1, line.encode())


def watches_every_folder(files):
    """A flood of watches and events ends with the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(0)
    for path in ("/", "/usr", files["home"], "."):
        libc.inotify_add_watch(watcher, path.encode(), 0xFFF)
    for number in range(20_000):
        os.close(os.open(f"file{number % 10}", os.O_CREAT | os.O_WRONLY))


def reads_the_mounts_and_its_memory(files):
    for name in ("environ", "cmdline", "mountinfo", "auxv"):
        with suppress(OSError):
            if SECRET.encode() in Path("/proc/self", name).read_bytes():
                raise Breach(name)
    for pid in others():
        for name in ("mem", "syscall", "stack", "pagemap", "clear_refs"):
            refused(lambda pid=pid, name=name: os.open(f"/proc/{pid}/{name}", os.O_RDONLY), f"{pid} {name}")


def makes_itself_important(files):
    own = os.getpid()
    for pid in (files["driver"], os.getppid()):
        refused(lambda pid=pid: os.setpriority(os.PRIO_PROCESS, pid, 19), f"priority of {pid}")
        refused(lambda pid=pid: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)), f"scheduler of {pid}")
        refused(lambda pid=pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1)), f"limits of {pid}")
    refused(lambda: os.sched_setscheduler(own, os.SCHED_FIFO, os.sched_param(1)), "real time")
    refused(lambda: os.setpriority(os.PRIO_PROCESS, own, -20), "priority")


def locks_memory(files):
    size = 1 << 28
    region = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0:
        raise Breach("locked memory")


def changes_what_the_next_call_sees(files):
    os.environ["TZ"] = "Pacific/Kiritimati"
    time.tzset()
    locale.setlocale(locale.LC_ALL, "C")
    builtins.sum = builtins.len = lambda *_: 7
    os.umask(0o777)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
