"""`rlpack serve` as a process: what it prints, and how it ends."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

START_S = 400.0


class Served(NamedTuple):
    """A running command: its process, what it has printed, and what a shell with its lines has in the environment."""

    process: "subprocess.Popen[str]"
    printed: str
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        return self.environment["OPENAI_BASE_URL"]

    @property
    def token(self) -> str:
        return self.environment["OPENAI_API_KEY"]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "rlpack", "serve", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_signals,
    )


def heed_signals() -> None:
    """Undo what a shell in the background or `nohup` sets for a suite, and so for its children: to ignore signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def printed_until(process: "subprocess.Popen[str]", last: str) -> str:
    """Return what a command prints up to a line; the command has its own deadline."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(last):
            return "".join(lines)
    raise AssertionError(f"it ended: {''.join(lines)}")


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Served]:
    """Run the command, and what it tells a user to paste."""
    process = start(folder, "--max-length", "1024", "--start-timeout", str(START_S), *arguments)
    try:
        printed = printed_until(process, "Ctrl-C ends the server")
        lines = re.findall(r"^export .*$", printed, re.MULTILINE)
        show = 'printf "%s\\n" "$OPENAI_BASE_URL" "$OPENAI_API_KEY"'
        shell = subprocess.run("\n".join([*lines, show]), shell=True, capture_output=True, text=True, timeout=60.0)
        url, token = shell.stdout.splitlines()
        yield Served(process, printed, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": token})
    finally:
        process.terminate()
        process.wait(timeout=20.0)


def ends(process: "subprocess.Popen[str]", number: int) -> int:
    """Signal a command, check that it and all its processes end within 10 s, and return its exit code."""
    processes = family(process)
    assert processes
    begin = time.monotonic()
    process.send_signal(number)
    code = process.wait(timeout=20.0)
    while alive(processes) and time.monotonic() - begin < 10.0:
        time.sleep(0.1)
    assert alive(processes) == []
    return code
