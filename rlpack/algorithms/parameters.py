"""The parameters of losses and advantage functions, checked with and without importing PyTorch."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from rlpack.algorithms.errors import AlgorithmError

# Limits on the built-in functions' arguments: a description of the allowed values, and a predicate.
_LIMITS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "clip_low": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "clip_high": ("0 or more", lambda value: value >= 0),
    "dual_clip": ("above 1", lambda value: value > 1),
    **dict.fromkeys(("tau_positive", "tau_negative", "epsilon", "max_ratio"), ("above 0", lambda value: value > 0)),
    "share": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "coef": ("0 or more", lambda value: value >= 0),
}
# How a function gets arguments that are not available.
_OTHERS: Mapping[str, str] = {
    "algorithm.loss": "set others in algorithm.loss_arguments",
    "algorithm.advantage": (
        "set others in algorithm.advantage_arguments, or return them from a scoring role, as columns of numbers (those "
        "of the dataset under other names)"
    ),
}
# Per-row columns that an advantage function can always name.
ROW_COLUMNS = ("rewards", "group_ids", "valid", "prompt_lengths", "response_lengths", "response_tokens")


def check_parameters(
    parameters: Sequence[inspect.Parameter],
    key: str,
    offered: Iterable[str] | None,
    arguments: Mapping[str, Any],
    *,
    target: str,
    positional: int,
    settings: Iterable[str] = (),
) -> None:
    """Raise if a function lacks a configured parameter, or requires one that is not available.

    Args:
        parameters: the function's parameters.
        key: `algorithm.loss` or `algorithm.advantage`.
        offered: names of arguments that are passed only if the function has such parameters; None if that isn't known.
        arguments: names and values of arguments that are always passed.
        target: the function's name, as in the configuration.
        positional: number of arguments that are passed by position.
        settings: those names in `offered` that are keys of `algorithm`; the others are columns of a batch.

    Raises:
        AlgorithmError: names the argument or the parameter.
    """
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_position = {parameter.name for parameter in parameters[:positional]}
    names = sorted(parameter.name for parameter in parameters[positional:] if not _is_variadic(parameter))
    unknown = [name for name in arguments if name in by_position or not (accepts_any or name in names)]
    if unknown:
        those = f"those are {', '.join(names)}" if names else "it has none"
        raise AlgorithmError(
            f"{key}_arguments.{min(unknown)} is not a parameter of the function that can be set; {those}"
        )
    if offered is None:
        return
    available = {*offered, *arguments}
    for parameter in parameters[positional:]:
        if not _is_variadic(parameter) and parameter.default is parameter.empty and parameter.name not in available:
            raise AlgorithmError(
                f"{key}={target} requires {parameter.name!r}{_suggestion(parameter.name, available)}; "
                f"{_available(available, set(settings))}; {_OTHERS[key]}"
            )


def _available(names: Collection[str], settings: Collection[str]) -> str:
    """Return what a function can name: columns before keys, and those of every batch before others."""
    columns = sorted({*names} - {*settings}, key=lambda name: (_rank(name), name))
    if not settings:
        return f"available are {', '.join(columns)}"
    keys = ", ".join(sorted({*names} & {*settings}))
    return f"a batch has {', '.join(columns)}; keys of algorithm are available, too: {keys}"


def _rank(name: str) -> int:
    return ROW_COLUMNS.index(name) if name in ROW_COLUMNS else len(ROW_COLUMNS)


def _suggestion(name: str, available: Iterable[str]) -> str:
    """Return a question for the available name that is closest to `name`, "" if none is close."""
    nearest = get_close_matches(name, sorted(available), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _is_variadic(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def check_limits(key: str, arguments: Mapping[str, Any]) -> None:
    """Raise if an argument of a built-in function is a number outside its limits; other values are not checked.

    >>> check_limits("algorithm.loss", {"tau_positive": 0.0})
    Traceback (most recent call last):
    ...
    rlpack.algorithms.errors.AlgorithmError: algorithm.loss_arguments.tau_positive is 0.0; set it above 0

    Args:
        key: `algorithm.loss` or `algorithm.advantage`.
        arguments: names and values.

    Raises:
        AlgorithmError: names the argument, its value and the limits.
    """
    for name, value in arguments.items():
        allowed, is_allowed = _LIMITS.get(name, ("", None))
        if is_allowed is None or not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or not is_allowed(value):
            raise AlgorithmError(f"{key}_arguments.{name} is {value}; set it {_to(allowed)}")


def no_function_error(key: str, target: str, functions: Iterable[str]) -> AlgorithmError:
    """Return the error of a module that lacks the function of a target.

    Args:
        key: `algorithm.loss` or `algorithm.advantage`.
        target: `module:function`.
        functions: names of the functions that the module has.
    """
    module, _, name = target.partition(":")
    return AlgorithmError(
        f"{key} is {target!r}, but {module} has no function {name}; its functions are: {', '.join(functions) or 'none'}"
    )


def _to(allowed: str) -> str:
    return allowed if allowed.startswith(("from", "above")) else f"to {allowed}"
