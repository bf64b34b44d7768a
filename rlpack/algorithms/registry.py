"""Find a policy loss or an advantage function by the name that a configuration gives, and see that it can be called.

A user's own is `package.module:function`. What it takes beyond the fixed arguments is named by its signature: settings
of `algorithm` (clip_low, …), `algorithm.loss_arguments` and `algorithm.advantage_arguments`, and for an advantage
function any column of numbers a row that roles left in the batch.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlpack.algorithms import advantages, policy_loss
from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.policy_loss import PolicyLoss
from rlpack.algorithms.statistics import kl_cov

LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo_clip": policy_loss.ppo_clip,
    "gspo": policy_loss.gspo,
    "cispo": policy_loss.cispo,
    "sapo": policy_loss.sapo,
    "reinforce": policy_loss.reinforce,
    "kl_cov": kl_cov,
}
ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_relative": advantages.group_relative,
    "opo": advantages.opo,
    "remax": advantages.remax,
    "reinforce_pp": advantages.reinforce_pp,
}


def find_loss(target: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> Callable[..., PolicyLoss]:
    """Return the loss, once it is known that it takes `arguments`.

    Raises:
        AlgorithmError: there is no such function, or it can't be called with tokens, an argument, or without more.
    """
    function = _find("algorithm.loss", target, LOSSES)
    _check(function, "algorithm.loss", {"tokens", "statistics", *settings}, arguments, positional=1)
    return function


def find_advantage(target: str, arguments: Mapping[str, Any], columns: Iterable[str]) -> Callable[..., Tensor]:
    """Return the advantage function, once it is known that `columns` and `arguments` give it what it asks for.

    Raises:
        AlgorithmError: there is no such function, or it asks for something else.
    """
    function = _find("algorithm.advantage", target, ADVANTAGES)
    _check(function, "algorithm.advantage", columns, arguments, positional=0)
    return function


def advantage_parameters(target: str) -> set[str]:
    """Return the names that the advantage function asks for.

    Raises:
        AlgorithmError: there is no such function.
    """
    return set(inspect.signature(_find("algorithm.advantage", target, ADVANTAGES)).parameters)


def row_advantages(
    target: str, arguments: Mapping[str, Any], settings: Mapping[str, Any], columns: Mapping[str, Tensor]
) -> Tensor:
    """Return the advantage of each row, f32 [B], by `algorithm.advantage`; rows that are not `valid` have 0.

    Args:
        target: the function's name.
        arguments: `algorithm.advantage_arguments`.
        settings: of `algorithm`; the function gets those that it names.
        columns: of rows, [B] or [B, k]: `rewards`, `group_ids`, `valid`, and others that roles left.

    Raises:
        AlgorithmError: the function asks for a column that isn't there, or returns something else.
    """
    function = find_advantage(target, arguments, {*columns, *settings})
    found = call_with(function, offered={**settings, **columns}, **arguments)
    rows, valid = columns["rewards"].shape, columns["valid"]
    if not isinstance(found, Tensor) or found.shape != rows:
        what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise AlgorithmError(f"algorithm.advantage {target!r} gave {what}; return a tensor {list(rows)}")
    broken = (valid & ~found.isfinite()).nonzero().flatten().tolist()
    if broken:
        value = found[broken[0]].item()
        raise AlgorithmError(f"algorithm.advantage {target!r} gave row {broken[0]} {value}, which is no finite number")
    return torch.where(valid, found, 0.0).float()


def call_with(function: Callable[..., Any], *given: Any, offered: Mapping[str, Any], **arguments: Any) -> Any:
    """Call a function with what it asks for of `offered`, by name, and all `arguments`."""
    asked = inspect.signature(function).parameters
    chosen = {name: offered[name] for name in asked if name in offered and name not in arguments}
    return function(*given, **chosen, **arguments)


def _find(key: str, target: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if target in known:
        return known[target]
    module_name, _, name = target.partition(":")
    if not module_name or not name.isidentifier():
        raise AlgorithmError(f"{key} is {target!r}; choose one of {', '.join(known)}, or give package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a user's module runs it: anything may come
        reason = f"{type(error).__name__}: {error}"
        raise AlgorithmError(f"{key} is {target!r}, and {module_name} can't be imported: {reason}") from error
    function = vars(module).get(name)
    if not callable(function):
        functions = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
        raise AlgorithmError(
            f"{key} is {target!r}; {module_name} has no function {name}, it has: {functions or 'none'}"
        )
    return function


def _check(
    function: Callable[..., Any], key: str, offered: Iterable[str], arguments: Mapping[str, Any], *, positional: int
) -> None:
    """Refuse arguments that the function doesn't take, and a function that takes what isn't there."""
    parameters = list(inspect.signature(function).parameters.values())
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    unknown = sorted(set(arguments) - names)
    if unknown and not takes_all:
        raise AlgorithmError(f"{key}_arguments.{unknown[0]} is no argument of the function; it takes {sorted(names)}")
    given = {*offered, *arguments}
    for parameter in parameters[positional:]:
        free = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if not free and parameter.default is parameter.empty and parameter.name not in given:
            raise AlgorithmError(
                f"the function of {key} needs {parameter.name!r}; there are {', '.join(sorted(given))}, and "
                f"{key}_arguments can give more"
            )
