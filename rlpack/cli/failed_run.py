"""The error that ends a command: its message and its exit code."""

import os
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path

from rlpack.batch.errors import DataError
from rlpack.cli.error_text import print_error
from rlpack.distributed.errors import UnavailableError
from rlpack.observe.errors import SinkUnavailableError, StandardOutputClosedError
from rlpack.run_log import current_log
from rlpack.user_code import describe_exception

RUN_FAILED, CONFIG_WRONG, DATA_WRONG, UNAVAILABLE, INTERRUPTED = 1, 2, 3, os.EX_TEMPFAIL, 130
_OWN_PACKAGES = ("rlpack.",)
# Folders of installed packages, wherever they are.
_INSTALLED = {"site-packages", "dist-packages"}


def report_failure(error: Exception, command: str = "train") -> int:
    """Print the error that ended a run, unless it has been printed, and return its exit code.

    The configuration or the data can't be all that is wrong with a run that has taken a step.
    """
    run_log = current_log()
    if run_log is None:
        print_failure(error, command)
    else:
        run_log.record_failure(error)
    if run_log is not None and run_log.has_steps:
        return RUN_FAILED
    if isinstance(error, UnavailableError | SinkUnavailableError):
        return UNAVAILABLE
    if isinstance(error, DataError):
        return DATA_WRONG if _place_in_user_code(error) is None else RUN_FAILED
    return CONFIG_WRONG if _is_ours(error) and isinstance(error, ValueError) else RUN_FAILED


def print_failure(error: BaseException, command: str = "train") -> None:
    """Print an error, with a traceback if it isn't ours, and where the logs are; a closed pipe ends the run quietly."""
    if isinstance(error, StandardOutputClosedError):
        return
    if not _is_ours(error) or os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
        if not _is_ours(error) and (frame := _frame_in_user_code(error)) is not None:
            print_error(command, f"{frame}: {describe_exception(error)}")
    else:
        place = _place_in_user_code(error)
        print_error(command, str(error) if place is None else f"{place}: {error}")
    run_log = current_log()
    if run_log is not None and (places := run_log.places()):
        print_error(command, places)


def _place_in_user_code(error: BaseException) -> str | None:
    """Return the line of a user's own module, such as a recipe, that misused a batch; None for any other error."""
    frames = list(traceback.walk_tb(error.__traceback__)) if isinstance(error, DataError) else []
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
    callers = [index for index, name in enumerate(names) if not f"{name}.".startswith("rlpack.batch.")]
    if not callers or callers[-1] == len(frames) - 1 or f"{names[callers[-1]]}.".startswith(_OWN_PACKAGES):
        return None
    frame, line = frames[callers[-1]]
    return f"{_relative(frame.f_code.co_filename)}, line {line}, in {frame.f_code.co_name}"


def _frame_in_user_code(error: BaseException) -> str | None:
    """Return the innermost line outside rlpack, Python's library and installed packages; None if there is none."""
    library = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        is_ours = f"{module}.".startswith(_OWN_PACKAGES) or module == "__main__"
        is_installed = file.startswith((*library, "<")) or not _INSTALLED.isdisjoint(Path(file).parts)
        if not is_ours and not is_installed:
            return f"{_relative(file)}, line {line}, in {frame.f_code.co_name}"
    return None


def _relative(file: str) -> str:
    """Return the path of a file from the working directory if it is below it, else as it is."""
    with suppress(OSError, ValueError):  # the directory was deleted, or is on another drive
        path = os.path.relpath(file)
        return file if path.startswith(os.pardir) else path
    return file


def _is_ours(error: BaseException) -> bool:
    return any(parent.__module__.startswith(_OWN_PACKAGES) for parent in type(error).__mro__)
