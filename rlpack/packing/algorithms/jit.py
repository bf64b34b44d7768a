"""Compile inner loops with Numba, or leave them to Python where Numba is missing."""

import os
from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A function that is compiled when it is first called; made by `compiled`."""

    def __init__(self, function: Callable[P, R]) -> None:
        update_wrapper(self, function)
        self.plain = function
        self._ready: Callable[..., Any] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the compiled function, compiling it first if need be."""
        return self.ready()(*args, **kwargs)

    def ready(self) -> Callable[..., Any]:
        """Return what Numba makes of the function, or the function itself without Numba."""
        if self._ready is None:
            self._ready = _compile(self.plain)
        return self._ready


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Return `function`, to be compiled at its first call.

    Numba is imported by then only, so that importing the planner stays cheap, and what it made is kept on disk. The
    result is the same without Numba (missing, or turned off by NUMBA_DISABLE_JIT), only slower. A compiled function
    may call others of its module.
    """
    return Compiled(function)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in {"", "0"}:
        return function
    try:
        import numba
    except ImportError:
        return function
    assert isinstance(function, FunctionType)
    # Numba looks names up in the function's globals, and can call there what Numba made, not our wrappers of it.
    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        if isinstance(scope.get(name), Compiled):
            scope[name] = scope[name].ready()
    bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    bound.__module__, bound.__qualname__ = function.__module__, function.__qualname__
    try:
        return numba.njit(cache=True)(bound)
    except RuntimeError:  # no folder that the compiled code could be kept in
        return numba.njit(bound)
