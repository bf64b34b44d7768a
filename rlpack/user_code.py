"""Calls of users' code: reward functions, roles, losses, advantages and recipes may raise anything.

SystemExit, GeneratorExit and the like pass every `except Exception`, and would end the command with no message, some
with exit code 0. All imports and calls of users' code go through this module, which makes an error of them. A
KeyboardInterrupt that the user code raises is an error, too; that of a signal passes.
"""

import importlib
import importlib.util
import signal
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType


class Interrupted(KeyboardInterrupt):
    """The KeyboardInterrupt of rlpack's signal handlers, and of a run that stops because of them."""


class UserCodeError(RuntimeError):
    """User code raised what would have ended its process without a message, such as SystemExit."""


class UserCode:
    """Context manager around user code; inside it, an exception that is no `Exception` becomes an error.

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
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise an error in place of an exception that isn't one.

        Raises:
            UserCodeError: the code raised, for example, SystemExit.
        """
        if error is None or isinstance(error, Exception) or _is_interrupt(error):
            return
        description = describe_exception(error)
        raise self._error(f"{self._what} raised {description}" if self._what else description) from error


def import_user_module(name: str) -> ModuleType:
    """Import a user's module.

    Raises:
        UserCodeError: the module raised, for example, SystemExit; other exceptions pass.
    """
    with UserCode():
        return importlib.import_module(name)


def find_user_module(name: str) -> ModuleSpec | None:
    """Find a user's module, None if there is none; the packages above it are imported.

    Raises:
        UserCodeError: such a package raised, for example, SystemExit; other exceptions pass.
    """
    with UserCode():
        return importlib.util.find_spec(name)


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


def _is_interrupt(error: BaseException) -> bool:
    """Whether an exception comes from a signal and not from user code.

    Python's own handler raises a plain KeyboardInterrupt, in the main thread.
    """
    if isinstance(error, Interrupted):
        return True
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
