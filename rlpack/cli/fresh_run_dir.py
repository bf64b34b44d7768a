"""Default names of run directories, reserved so that runs that start in the same second get different ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

_FOLDER = "runs"
# Returns the run directory of a recipe's run that starts at a time.
Namer = Callable[[datetime, str], str]


def names(now: datetime, recipe: str) -> Iterator[Path]:
    """Yield runs/<date>-<recipe>, then the same with the suffixes -2, -3, ….

    >>> next(names(datetime(2026, 1, 2, 3, 4, 5), "grpo")).as_posix()
    'runs/2026-01-02_03-04-05-grpo'
    """
    base = Path(_FOLDER) / f"{now:%Y-%m-%d_%H-%M-%S}-{recipe}"
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def free_name(now: datetime, recipe: str) -> str:
    """Return the first name that doesn't exist."""
    return str(next(name for name in names(now, recipe) if not name.exists()))


@contextmanager
def reserved_names() -> Iterator[Namer]:
    """Yield a function that returns a free name and creates the directory, which is removed in the end if it is empty.

    A directory that can't be created is left to the checks of the run, whose message has the key.
    """
    created: list[Path] = []
    was_missing = not Path(_FOLDER).exists()

    def reserve(now: datetime, recipe: str) -> str:
        for name in names(now, recipe):
            try:
                name.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError:
                return str(name)
            created.append(name.absolute())
            return str(name)
        raise AssertionError("names never end")

    try:
        yield reserve
    finally:
        with suppress(OSError):  # the first that isn't empty
            for folder in (*created, *(name.parent for name in created if was_missing)):
                with suppress(FileNotFoundError):  # a run that fails early removes its own
                    folder.rmdir()
