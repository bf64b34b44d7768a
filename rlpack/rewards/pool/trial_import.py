"""Import reward functions in a confined process before a run starts, and return how they are called.

A module's top level is user code like the function itself: it may read credentials, end its process, or hang. It
therefore never runs in the driver. Only text comes back, and it is checked.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from rlpack.rewards.errors import PoolError, RewardError
from rlpack.rewards.pool.call_queue import FunctionSpec, PoolSettings
from rlpack.rewards.pool.pool import COULD_NOT_START, RewardPool
from rlpack.rewards.pool.processes import printable
from rlpack.rewards.pool.sandbox import unenforced
from rlpack.rewards.signatures import NEVER_CALLED, Signature, read_signature, resolve

_TIMEOUT_S = 10.0
_OURS = "rlpack.rewards."
_Functions = tuple[tuple[str, str], ...]


def import_functions(
    targets: Mapping[str, str], settings: PoolSettings, timeout_s: float, *, are_called: bool
) -> dict[str, Signature]:
    """Return the signatures of functions by their keys, such as `reward.function`.

    Functions of rlpack are imported in this process. Results are kept: a second call costs nothing.

    Args:
        targets: package.module:function by key.
        settings: the run's settings, with one process. On a machine that can't provide the `strict` sandbox, the
            `limits` sandbox is used; it is up to the caller to refuse the run.
        timeout_s: deadline of a call; the deadline of an import is the same, but at least 10 s.
        are_called: whether a reward pool will call them; otherwise their parameters are not checked.

    Raises:
        RewardError: a function can't be imported, or follows no calling convention.
    """
    signatures = {}
    for key, target in targets.items():
        if target.startswith(_OURS):
            function = resolve(target, key)
            signatures[key] = read_signature(function, key) if are_called else NEVER_CALLED
    strict = settings.strict and not unenforced(processes=settings.limits.processes > 0)
    functions = tuple((key, target) for key, target in targets.items() if key not in signatures)
    if not functions:
        return signatures
    place = (tuple(sys.path), os.getcwd())
    limit_s = max(timeout_s, _TIMEOUT_S)
    return {**signatures, **_import(functions, replace(settings, strict=strict), limit_s, are_called, place)}


@lru_cache
def _import(
    functions: _Functions, settings: PoolSettings, timeout_s: float, are_called: bool, place: object
) -> Mapping[str, Signature]:
    """Import functions in a separate process; errors are not cached.

    Args:
        functions: pairs of key and target.
        settings: see `import_functions`.
        timeout_s: deadline of the process.
        are_called: see `import_functions`.
        place: where modules are searched, which determines what a target refers to.
    """
    specs = {key: FunctionSpec(target, {}, timeout_s, key, is_called=are_called) for key, target in functions}
    deadline = time.monotonic() + timeout_s
    pool = RewardPool(specs, settings)
    try:
        pool.wait(timeout_s=timeout_s)
        signatures = pool.signatures()
    except PoolError as error:
        is_overdue = time.monotonic() > deadline
        pool.close()
        for function in functions if len(functions) > 1 else ():  # to find the one at fault
            _import((function,), settings, timeout_s, are_called, place)
        raise _import_error(functions, timeout_s if is_overdue else None, error) from error
    finally:
        pool.close()
    return {key: replace(signature, name=printable(signature.name)) for key, signature in signatures.items()}


def _import_error(functions: _Functions, limit_s: float | None, error: PoolError) -> RewardError:
    """Return the error for a process that ended, or that exceeded its limit."""
    if limit_s is None:
        cause = str(error).removeprefix(COULD_NOT_START)
        return RewardError(f"{_names(functions)}, which can't be imported: {cause}")
    return RewardError(
        f"{_names(functions)}, which was not imported within {limit_s:g} s; do the work in the function, or raise "
        "reward.timeout_s"
    )


def _names(functions: _Functions) -> str:
    return ", ".join(f"{key} is {target!r}" for key, target in functions)
