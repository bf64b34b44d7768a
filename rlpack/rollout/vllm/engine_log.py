"""The log file of vLLM, from the rank and from vLLM's process, which is searched for the causes of errors.

vLLM and its dependencies also write to standard error, from C++ and before vLLM configures logging. That output goes to
the same file, and from there to the run's log, so that the console shows only rlpack's messages.
"""

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

_log = logging.getLogger(__name__)

_ERROR = re.compile(r"(?:^|\s)([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)): (\S.*)$")
_HEADLINE = re.compile(r"\d+ validation errors? for \S+$")
_STDERR = 2  # of a process
_MOST_TEXT = 20_000  # characters of vLLM's log that go into the run's
_MOST_REASON = 1_000  # characters of an error's text


class EngineLog:
    """A folder with vLLM's log; it lives as long as the engine.

    Attributes:
        path: the log file, with warnings and errors.
        config: the file that tells vLLM to write it (`VLLM_LOGGING_CONFIG_PATH`).
    """

    def __init__(self) -> None:
        """Write the configuration."""
        self._folder = tempfile.TemporaryDirectory(prefix="rlpack-vllm-log-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name) / "vllm.log"
        self.config = Path(self._folder.name) / "logging.json"
        self.path.touch()
        self._read = 0  # bytes that were copied to the run's log
        handler = {"class": "logging.FileHandler", "filename": str(self.path), "formatter": "plain"}
        settings = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
            "handlers": {"file": handler},
            "loggers": {"vllm": {"handlers": ["file"], "level": "WARNING", "propagate": False}},
        }
        self.config.write_text(json.dumps(settings), encoding="utf-8")

    @contextmanager
    def standard_error(self) -> Iterator[None]:
        """Append standard error of this process, and of the processes that the block starts, to the log."""
        sys.stderr.flush()
        before, log = os.dup(_STDERR), os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.dup2(log, _STDERR)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, _STDERR)
            os.close(before)
            os.close(log)

    def record(self) -> None:
        """Copy new output to the run's log at level INFO."""
        self._pass_on(logging.INFO)

    def explain(self, error: BaseException) -> str:
        """Return the cause of an error raised by vLLM, and copy new output to the run's log at level ERROR."""
        text = self._pass_on(logging.ERROR)
        return first_error(text) or f"{type(error).__name__}: {_in_one_line(str(error))}"

    def last_words(self) -> str:
        """Return the first error in new output, else the last line, and copy it to the run's log at level ERROR."""
        text = self._pass_on(logging.ERROR)
        return first_error(text) or _in_one_line((text.strip().splitlines() or [""])[-1])

    def _pass_on(self, level: int) -> str:
        """Copy new output to the run's log and return it."""
        logged = self.path.read_bytes()
        text, self._read = logged[self._read :].decode("utf-8", errors="replace"), len(logged)
        if text:
            _log.log(level, "vLLM logged:\n%s", text[-_MOST_TEXT:].rstrip())
        return text


def _in_one_line(text: str) -> str:
    """Return an error's text without pydantic's link, in one line."""
    words = text.partition("For further information visit")[0].split()
    return " ".join(words)[:_MOST_REASON]


def first_error(text: str) -> str:
    r"""Return the first error in a log, with its type; "" if there is none.

    >>> first_error("1 problem\nx.ValidationError: 1 validation error for A\n  Value error, too long [type=b]")
    'x.ValidationError: 1 validation error for A: Value error, too long'
    """
    lines = text.splitlines()
    for line, following in pairwise([*lines, ""]):
        if (match := _ERROR.search(line)) and " WARNING " not in line:
            # pydantic gives the reason in the lines after its headline.
            reason = following.split(") ", 1)[-1].partition("[type=")[0].strip() if _HEADLINE.match(match[2]) else ""
            return f"{match[1]}: {match[2]}" + (f": {reason}" if reason else "")
    return ""
