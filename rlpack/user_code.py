"""Calls of users' code: reward functions, roles, losses, advantages and recipes may raise anything.

SystemExit, GeneratorExit and the like pass every `except Exception`, and would end the command with no message, some
with exit code 0. All imports and calls of users' code go through this module, which turns them into errors. A
KeyboardInterrupt raised by user code is an error, too; one caused by a signal passes through.

The `rlpack train` command runs recipes, losses and advantages in its own process, which `protect_command` guards
further: `os._exit` and `os.abort` raise, an import has a deadline, its change of the working directory is undone, and a
closed standard output or error is opened again.
"""

import importlib
import importlib.util
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import ClassVar, NoReturn, TextIO

log = logging.getLogger(__name__)

_IMPORT_TIMEOUT_S, _IMPORT_WARNING_S = 120.0, 10.0

# Ends this process at once, even where `os._exit` is replaced.
exit_now = os._exit


class Interrupted(KeyboardInterrupt):
    """The KeyboardInterrupt of rlpack's signal handlers, and of a run that stops because of them.

    Attributes:
        last: `time.monotonic()` of the last one in this process, minus infinity without any.
    """

    last: ClassVar[float] = -math.inf

    def __init__(self, *args: object) -> None:
        """Take the number of the signal, if one is to be passed on."""
        super().__init__(*args)
        Interrupted.last = time.monotonic()


class UserCodeError(RuntimeError):
    """User code raised an exception that would have ended its process without a message, such as SystemExit."""


class ProcessExit(BaseException):
    """User code called `os._exit` or `os.abort`, which would have ended the command without a message."""


class ImportTimeout(BaseException):
    """A user's module took too long to import."""


@dataclass(frozen=True)
class _Command:
    """The state of the command when `protect_command` was called.

    Attributes:
        pid: the command's process; in its forks nothing is guarded.
        streams: copies of the descriptors of standard output and error that were open.
        texts: Python's file objects for standard output and error.
    """

    pid: int
    streams: Mapping[int, int]
    texts: Mapping[str, TextIO | None]


_commands: list[_Command] = []


def protect_command() -> None:
    """Keep user code from ending this process without a message, from now on."""
    if _commands and _commands[0].pid == os.getpid():
        return
    streams = {}
    for number in (1, 2):
        with suppress(OSError):  # closed by the caller
            streams[number] = os.dup(number)
    _commands[:] = [_Command(os.getpid(), streams, {"stdout": sys.stdout, "stderr": sys.stderr})]
    for module in (os, importlib.import_module(os.name)):
        module.__dict__.update(_exit=_refuse_exit, abort=_refuse_abort)


class UserCode:
    """Context manager around user code; inside it, an exception that isn't an `Exception` becomes one.

    >>> with UserCode("reward.function 'mine:f'"):
    ...     raise SystemExit(3)
    Traceback (most recent call last):
    ...
    rlpack.user_code.UserCodeError: reward.function 'mine:f' raised SystemExit: 3
    """

    def __init__(self, what: str = "", error: Callable[[str], Exception] = UserCodeError) -> None:
        """Name the code, by its configuration key and value, and the error to raise."""
        self._what = what
        self._error = error

    def __enter__(self) -> None:
        """Note the time, so that later interrupts are known."""
        self._entered = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Replace an exception that isn't an `Exception` with an error.

        Raises:
            UserCodeError: the code raised, for example, SystemExit.
        """
        _restore_streams()
        if error is None or isinstance(error, Exception) or _is_interrupt(error, self._entered):
            return
        description = describe_exception(error)
        raise self._error(f"{self._what} raised {description}" if self._what else description) from error


def import_user_module(name: str) -> ModuleType:
    """Import a user's module.

    Raises:
        UserCodeError: the module raised, for example, SystemExit; other exceptions pass.
    """
    with UserCode(), _guarded_import(name):
        return importlib.import_module(name)


def find_user_module(name: str) -> ModuleSpec | None:
    """Find a user's module, None if there is none; the packages above it are imported.

    Raises:
        UserCodeError: such a package raised, for example, SystemExit; other exceptions pass.
    """
    with UserCode(), _guarded_import(name):
        return importlib.util.find_spec(name)


def find_module_file(name: str) -> Path | None:
    """Return the file of a user's module, None if there is none; the packages above it are not imported.

    Raises:
        UserCodeError: finding the module ran code that raised, for example, SystemExit; other exceptions pass.
    """
    top, *rest = name.split(".")
    spec = find_user_module(top)
    if spec is None or not rest:
        return None if spec is None or spec.origin is None else Path(spec.origin)
    paths = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = (file for path in paths for file in (path / "__init__.py", path.parent / f"{path.name}.py"))
    return next((file for file in files if file.is_file()), None)


def describe_exception(error: BaseException) -> str:
    """Return type and text of an exception of user code.

    >>> describe_exception(SystemExit(0)), describe_exception(UserCodeError("SystemExit: 0"))
    ('SystemExit: 0', 'SystemExit: 0')
    """
    text = text_of(error)
    if isinstance(error, UserCodeError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return the text of an exception of user code, whose `__str__` may raise anything."""
    try:
        return str(error)
    except BaseException as other:  # noqa: BLE001 - an exception's __str__ is user code
        return f"(its text is unavailable: {type(other).__name__})"


def _command() -> _Command | None:
    """Return the command if this is its process."""
    return _commands[0] if _commands and _commands[0].pid == os.getpid() else None


def _refuse_exit(status: int) -> NoReturn:
    if _command() is None:
        exit_now(status)
    raise ProcessExit(f"os._exit({status!r})")


def _refuse_abort() -> NoReturn:
    if _command() is None:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGABRT)
    raise ProcessExit("os.abort()")


def _restore_streams() -> None:
    """Open standard output and error again if user code closed them."""
    command = _command()
    if command is None:
        return
    for number, copy in command.streams.items():
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):  # the copy is closed, too
                os.dup2(copy, number)
    for number, name in enumerate(("stdout", "stderr"), start=1):
        text = command.texts[name]
        if text is not None and text is vars(sys)[name] and text.closed and number in command.streams:
            opened = os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False)
            setattr(sys, name, opened)


@contextmanager
def _guarded_import(name: str) -> Iterator[None]:
    """Undo a change of the working directory, and end an import that takes too long, in the command's process.

    Only Python's main thread can be interrupted; code that imports in another thread waits for it with a deadline.
    """
    if _command() is None:
        yield
        return
    folder = None
    with suppress(OSError):  # deleted
        folder = os.getcwd()
    try:
        with _import_deadline(name):
            yield
    finally:
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)


@contextmanager
def _import_deadline(name: str) -> Iterator[None]:
    """Raise `ImportTimeout` in the block after `_IMPORT_TIMEOUT_S`, using the alarm signal; warn before that."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0] > 0.0:  # nested: one module imports another
        yield
        return
    start = time.monotonic()

    def ring(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - start < _IMPORT_TIMEOUT_S:
            log.warning("importing %s has taken %g s of at most %g s", name, _IMPORT_WARNING_S, _IMPORT_TIMEOUT_S)
        else:
            raise ImportTimeout(f"not done within {_IMPORT_TIMEOUT_S:g} s; do the work in its functions")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _IMPORT_WARNING_S, _IMPORT_TIMEOUT_S - _IMPORT_WARNING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _is_interrupt(error: BaseException, since: float) -> bool:
    """Return whether an exception comes from a signal rather than from user code.

    Python's own handler raises a plain KeyboardInterrupt, in the main thread. Ray's waits replace an `Interrupted` by a
    plain one.

    Args:
        error: the exception.
        since: `time.monotonic()` when the user code was called.
    """
    if isinstance(error, Interrupted):
        return True
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    return Interrupted.last >= since or signal.getsignal(signal.SIGINT) is signal.default_int_handler
