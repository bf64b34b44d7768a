"""Hostile functions that stop signals and time, or use up memory, files and descriptors."""

import mmap
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.unit.rewards.hostile_tools import Breach


def stops_itself(files):
    os.kill(os.getpid(), signal.SIGSTOP)


def blocks_every_signal(files):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        pass


def sets_an_alarm(files):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(60)


def stops_the_clock(files):
    time.monotonic = time.time = time.perf_counter = lambda: 0.0
    time.sleep = lambda _: None
    while True:
        pass


def fills_its_directory(files):
    for number in range(300):
        Path(f"file{number}").write_bytes(b"x" * 100)
    with Path("large").open("wb") as file:
        while True:
            file.write(b"x" * (1 << 22))


def nests_directories(files):
    for _ in range(1050):
        Path("d").mkdir()
        os.chdir("d")


def opens_many_files(files):
    opened = []
    try:
        while len(opened) < 100_000:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return
    raise Breach(f"{len(opened)} descriptors")


def starts_many_threads(files):
    while True:
        threading.Thread(target=time.sleep, args=(60,)).start()


def maps_all_memory(files):
    while True:
        mmap.mmap(-1, 1 << 30).write(b"x")


def removes_its_directory(files):
    os.chdir("/")
    os.umask(0)
    os.nice(19)
    with suppress(PermissionError):
        Path(os.environ["HOME"]).rename(Path(os.environ["HOME"] + "x"))
