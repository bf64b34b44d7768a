"""Decorators that declare how the driver calls a role's method.

The decorator of a method declares on which ranks it runs and what they receive:

- `@sharded`: its first argument is a batch; each data rank gets its shard of the columns that the method reads, with
  the plan attached, and the ranks' results become one: rows in the batch's order, or the result of `merge`.
- `@broadcast`: every rank runs it with the same arguments (a collective, for example); the driver gets rank 0's result.
- `@rank_zero`: only rank 0 runs it.
- `@one_rank`: the rank that the driver names runs it (`WorkerGroup.submit_to`); its first argument is a batch, and it
  chooses which rows it returns.

A decorator without arguments can be written with or without parentheses (except `@one_rank`, which requires some).

The decorators only record this on the function; called directly, in one process, a method is plain Python.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any, Literal, ParamSpec, TypeVar, overload

from rlpack.distributed.column_contract import ColumnContract, Reads, as_names

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "__rlpack_dispatch__"


@dataclass(frozen=True)
class Dispatch:
    """How the driver calls a method.

    Attributes:
        kind: `sharded`, `broadcast`, `rank_zero` or `one_rank`.
        mini_batches: whether a sharded call splits its batch into optimizer steps.
        merge: combines the results of the output ranks; None restores rows.
        background: whether it runs in a thread, while its rank answers other calls.
        columns: what a sharded method reads and returns.
        needs_whole_groups: predicate on a sharded method's other arguments: whether all rows of a group (`group_ids`)
            must be in one microbatch.
    """

    kind: Literal["sharded", "broadcast", "rank_zero", "one_rank"]
    mini_batches: bool = False
    merge: Callable[[list[Any]], Any] | None = None
    background: bool = False
    columns: ColumnContract = field(default_factory=ColumnContract)
    needs_whole_groups: Callable[..., bool] | None = None


def _mark(dispatch: Dispatch) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        setattr(method, _MARK, dispatch)
        return method

    return decorate


@overload
def sharded(method: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def sharded(
    *,
    reads: Reads | None = None,
    optional: Sequence[str] = (),
    returns: Sequence[str] | None = None,
    mini_batches: bool = False,
    merge: Callable[[list[Any]], Any] | None = None,
    background: bool = False,
    needs_whole_groups: Callable[..., bool] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def sharded(
    method: Any = None,
    /,
    *,
    reads: Reads | None = None,
    optional: Sequence[str] = (),
    returns: Sequence[str] | None = None,
    mini_batches: bool = False,
    merge: Callable[[list[Any]], Any] | None = None,
    background: bool = False,
    needs_whole_groups: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """Mark a method whose first argument is a batch, sharded over the data ranks by a plan.

    A single column can be declared by just its name. Without arguments, the parentheses can be left out.

    Args:
        method: the method, given by Python where the parentheses are left out.
        reads: columns that the batch must have, `TEXT_COLUMNS` for all of its lists; or a function from the method's
            other arguments to these. Nothing else is sent. If omitted, an override inherits the columns of the method
            it overrides; any other method receives every column.
        optional: columns that are sent, too, if the batch has them. An override without `reads` adds them to those of
            the method that it overrides.
        returns: columns that the result must have; it may have more. An override inherits them if it is left out.
        mini_batches: plan the batch as optimizer steps of the role's mini-batch size, in arrival order. Set it on both
            a log-prob method and the update that compares with it, so that both get the same microbatches. Ignored if
            the call was given a plan (`with_plan`).
        background: run the method in a thread, while the ranks answer other calls: for methods that mostly wait for
            other processes or machines, take part in no collective, and return rows. Only ranks that get rows are
            called. A rank runs one such call of a role at a time, or as many as the role's `background_threads`.
        merge: combines the results of the output ranks; by default they are batches whose rows are restored.
        needs_whole_groups: predicate on the method's other arguments: whether all rows of a group (`group_ids`) must
            be in one microbatch; by default they need not be.
    """
    if method is not None and not _is_in_class(method):  # columns, or a function that chooses them
        given = method.__name__ if isfunction(method) else repr(method)
        decorated = "; above another decorator, write @sharded()" if isfunction(method) else ""
        raise TypeError(f"@sharded({given}) doesn't name its argument; write @sharded(reads={given}){decorated}")
    if returns is not None and merge is not None:
        raise ValueError("a method with a merge returns no rows; leave out returns or merge")
    if background and merge is not None:
        raise ValueError("a method that runs in the background returns rows; leave out merge or background")
    columns = ColumnContract(
        reads if reads is None or callable(reads) else as_names(reads),
        as_names(optional),
        None if returns is None else as_names(returns),
    )
    decorate = _mark(Dispatch("sharded", mini_batches, merge, background, columns, needs_whole_groups))
    return decorate if method is None else decorate(method)


def _is_in_class(method: Any) -> bool:
    """Return whether something is a function that a class body defines."""
    outer = method.__qualname__.rpartition(".")[0] if isfunction(method) else ""
    return outer != "" and not outer.endswith("<locals>")


@overload
def broadcast(method: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def broadcast() -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def broadcast(method: Callable[..., Any] | None = None, /) -> Callable[..., Any]:
    """Mark a method that every rank runs with the same arguments; the driver gets rank 0's result."""
    decorate = _mark(Dispatch("broadcast"))
    return decorate if method is None else decorate(method)


@overload
def rank_zero(method: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def rank_zero() -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def rank_zero(method: Callable[..., Any] | None = None, /) -> Callable[..., Any]:
    """Mark a method that only rank 0 runs."""
    decorate = _mark(Dispatch("rank_zero"))
    return decorate if method is None else decorate(method)


def one_rank(*, reads: Sequence[str], returns: Sequence[str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a method that one rank runs with rows of a batch, and that returns rows with the ids that it was given.

    It may return rows of earlier calls, as they become ready.

    Args:
        reads: columns that the batch must have; nothing else is sent.
        returns: columns that the result must have.
    """
    return _mark(Dispatch("one_rank", columns=ColumnContract(as_names(reads), (), as_names(returns))))


def declared_columns(method: Callable[..., Any]) -> ColumnContract:
    """Return the columns that a method declares; none for a method without a decorator."""
    dispatch: Dispatch | None = vars(method).get(_MARK)
    return ColumnContract() if dispatch is None else dispatch.columns


def dispatched_methods(role_class: type[Any]) -> dict[str, Dispatch]:
    """Return how each decorated method of a class is called, by name."""
    methods = {name: getattr(role_class, name) for name in dir(role_class)}
    return {
        name: dispatch_of(method) for name, method in methods.items() if isfunction(method) and is_dispatched(method)
    }


def is_dispatched(method: Callable[..., Any]) -> bool:
    """Whether a function carries a dispatch decorator."""
    return _MARK in vars(method)


def own_version(role_class: type[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a role class's version of a method, which is called by the function's name.

    Raises:
        TypeError: the class or one of its bases has the function under other names only, since a decorator below
            rlpack's renamed it: another method might be called.
        AttributeError: the class has no method of this name.
    """
    name = method.__name__
    attributes = [key for base in role_class.__mro__ for key, value in vars(base).items() if value is method]
    if attributes and name not in attributes:
        raise TypeError(
            f"{role_class.__qualname__}: its method {attributes[0]} is named {name!r}, by which ranks would call it; "
            f"in the decorator that returns {name}, decorate {name} with @functools.wraps(method)"
        )
    return getattr(role_class, name)


def dispatch_of(method: Callable[..., Any]) -> Dispatch:
    """Return how `method` is called.

    Raises:
        TypeError: the method carries no dispatch decorator.
    """
    dispatch = vars(method).get(_MARK)
    if dispatch is None:
        raise TypeError(f"{method.__qualname__} has no dispatch decorator; add @sharded(), @broadcast or @rank_zero")
    return dispatch
