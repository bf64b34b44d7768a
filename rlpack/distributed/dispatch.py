"""Decorators that say how the driver calls a role's method.

A method of a role runs in one of three ways, stated where it is written:

- `@sharded`: its first argument is a batch; each data-parallel rank gets its shard, with the plan attached, and the
  ranks' results become one: rows in the batch's first order, or whatever `merge` makes of them.
- `@broadcast`: every rank runs it with the same arguments (a collective, say); the driver gets rank 0's result.
- `@rank_zero`: rank 0 alone runs it.

The decorators only note this on the function; called directly, in one process, a method is plain Python.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "__rlpack_dispatch__"


@dataclass(frozen=True)
class Dispatch:
    """How the driver calls a method.

    Attributes:
        kind: `sharded`, `broadcast` or `rank_zero`.
        mini_batches: whether a sharded call splits its batch into the role's optimizer steps.
        merge: turns the results of all ranks, in rank order, into one; None restores rows.
        background: whether it runs in a thread, while its rank answers other calls.
    """

    kind: Literal["sharded", "broadcast", "rank_zero"]
    mini_batches: bool = False
    merge: Callable[[list[Any]], Any] | None = None
    background: bool = False


def _mark(dispatch: Dispatch) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        setattr(method, _MARK, dispatch)
        return method

    return decorate


def sharded(
    *, mini_batches: bool = False, merge: Callable[[list[Any]], Any] | None = None, background: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a method whose first argument is a batch, sharded over the ranks by a plan.

    Args:
        mini_batches: plan the batch as optimizer steps of the role's mini-batch size, in arrival order; a call with
            and one without it never share microbatches, so log-probs that an update is compared with set it too.
        background: run the method in a thread, while the ranks answer other calls: for methods that mostly wait for
            other processes or machines, take part in no collective, and return rows.
        merge: makes one result of the ranks' results; by default they are containers whose rows are restored.
    """
    if background and merge is not None:
        raise ValueError("a method that runs in the background returns rows; leave out merge or background")
    return _mark(Dispatch("sharded", mini_batches=mini_batches, merge=merge, background=background))


def broadcast(method: Callable[P, R]) -> Callable[P, R]:
    """Mark a method that every rank runs with the same arguments; the driver gets rank 0's result."""
    return _mark(Dispatch("broadcast"))(method)


def rank_zero(method: Callable[P, R]) -> Callable[P, R]:
    """Mark a method that rank 0 alone runs."""
    return _mark(Dispatch("rank_zero"))(method)


def is_dispatched(method: Callable[..., Any]) -> bool:
    """Whether a function carries a dispatch decorator."""
    return _MARK in vars(method)


def dispatch_of(method: Callable[..., Any]) -> Dispatch:
    """Return how `method` is called.

    Raises:
        TypeError: the method carries no dispatch decorator.
    """
    dispatch = vars(method).get(_MARK)
    if dispatch is None:
        raise TypeError(
            f"{method.__qualname__} does not say how it is called; decorate it with @sharded(), @broadcast or "
            "@rank_zero"
        )
    return dispatch
