"""Compile inner loops with Numba, or run them in Python if Numba is missing.

The result is the same with and without Numba. Importing this module does not import Numba.
"""

import os
from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A function that is compiled on its first call."""

    def __init__(self, function: Callable[P, R]) -> None:
        update_wrapper(self, function)
        self.python = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the compiled function, compiling it first if necessary."""
        return self.compile()(*args, **kwargs)

    def compile(self) -> Callable[..., Any]:
        """Return the compiled function, or the Python function if Numba is missing."""
        if self._compiled is None:
            self._compiled = _compile(self.python)
        return self._compiled


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Compile `function` with Numba on its first call.

    Numba is imported only then, so that importing the planner stays cheap, and the machine code is cached on disk.
    Without Numba (missing, or disabled by NUMBA_DISABLE_JIT) the result is the same, only slower. A compiled function
    may call other compiled functions of its module.
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
    # Numba resolves names in the function's globals, and can call compiled functions there but not our wrappers.
    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        if isinstance(scope.get(name), Compiled):
            scope[name] = scope[name].compile()
    bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    # Numba replaces the machine code that another version of it has stored under the same name. Environments that share
    # this folder, such as one with vLLM, would each compile again after the other.
    version = numba.__version__.replace(".", "_")
    bound.__module__, bound.__qualname__ = function.__module__, f"{function.__qualname__}_{version}"
    try:
        return numba.njit(cache=True)(bound)
    except RuntimeError:  # no writable folder for the cache
        return numba.njit(bound)
