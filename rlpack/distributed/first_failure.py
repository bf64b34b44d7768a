"""The first failure among the threads of a run, which explains the others."""

import copy

from rlpack.distributed.errors import RoleError


class FirstFailure:
    """The failure for which something was ended; later ones may be consequences."""

    def __init__(self) -> None:
        """Start without a failure."""
        self._first: RoleError | None = None

    def record(self, failure: BaseException | None) -> None:
        """Keep a failure of a role as it is now, unless there is one already."""
        if self._first is None and isinstance(failure, RoleError):
            self._first = _copy(failure)  # the thread that raises it may name its step in it

    def again(self) -> RoleError | None:
        """Return the failure as another error with the same cause, for another thread; None if there is none."""
        return None if self._first is None else _copy(self._first)


def _copy(failure: RoleError) -> RoleError:
    copied = copy.copy(failure)
    copied.__cause__ = failure.__cause__
    return copied
