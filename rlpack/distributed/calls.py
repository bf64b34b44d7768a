"""A call of a role's method, the handle of its result, and a value that goes from one role to another.

`submit` starts every kind of call: it returns a `Pending` at once, and `Pending.result` waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class Call:
    """One call of a method on ranks of a role.

    Attributes:
        role: name of the role.
        method: name of the method.
        args_of_rank: positional arguments of each rank that is called, in the order of `ranks`.
        kwargs: keyword arguments, the same for all.
        returns_rows: the method returns a batch; its token-sized columns go to the object store, not to the driver.
        output_ranks: ranks whose results are returned, in this order; None for all that are called. The others run the
            method for its effects (collectives with the output ranks).
        background: it runs in one of the role's own threads, while the ranks answer other calls.
        ranks: the ranks that are called; None for ranks 0, 1, …
        of_start: how many times the ranks had been started when they got the earlier calls that this one depends on;
            None if it may be repeated after a restart.
        answer_s: deadline of its answer, in seconds from its start; None for that of the pool, which counts from when
            the call is waited for.
        starts: whether it starts processes, for which it gets `placement.start_timeout_s` in addition.
    """

    role: str
    method: str
    args_of_rank: Sequence[tuple[Any, ...]]
    kwargs: dict[str, Any]
    returns_rows: bool = False
    output_ranks: tuple[int, ...] | None = None
    background: bool = False
    ranks: tuple[int, ...] | None = None
    of_start: int | None = None
    answer_s: float | None = None
    starts: bool = False

    @property
    def called(self) -> tuple[int, ...]:
        """Return the ranks that run the method."""
        return tuple(range(len(self.args_of_rank))) if self.ranks is None else self.ranks

    @property
    def outputs(self) -> tuple[int, ...]:
        """Return the ranks whose results are returned."""
        return self.called if self.output_ranks is None else self.output_ranks

    @property
    def name(self) -> str:
        """Return `role.method`."""
        return f"{self.role}.{self.method}"


class Relay(NamedTuple):
    """A value for all ranks of another role, bypassing the driver.

    Attributes:
        owner: the source rank whose result is passed on; `export` is a collective, which all ranks run.
        export: role, method and arguments.
        load: role, method, and the arguments that follow the value.
    """

    owner: int
    export: tuple[str, str, tuple[Any, ...]]
    load: tuple[str, str, tuple[Any, ...]]


class Pending(Generic[R]):
    """The result of a submitted call, which `result` waits for.

    >>> pending = Pending(lambda: 3)
    >>> pending.result(), pending.result()
    (3, 3)
    """

    def __init__(self, wait: Callable[[], R], answers: Sequence[Any] = ()) -> None:
        """Store the function that waits; it is called once, by the first `result`.

        Args:
            wait: waits for the call and returns its result.
            answers: references to the ranks' answers, for `Ranks.wait_any`.
        """
        self.answers = tuple(answers)
        self._wait: Callable[[], R] | None = wait
        self._outcome: R | None = None
        self._error: BaseException | None = None
        self._lock = Lock()

    def result(self) -> R:
        """Wait for the call and return its result.

        Later calls return the same result or raise the same error, including a KeyboardInterrupt. Threads that call it
        in the meantime also wait.

        Raises:
            RoleError: a rank raised, died, or missed its deadline.
        """
        with self._lock:
            if self._wait is not None:
                try:
                    self._outcome = self._wait()
                except BaseException as error:
                    self._error = error
                    raise
                finally:
                    self._wait = None  # so that the arguments of the call can be freed
        if self._error is not None:
            raise self._error
        return self._outcome  # pyright: ignore[reportReturnType]  # None only where R is None
