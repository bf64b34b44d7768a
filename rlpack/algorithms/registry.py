"""Look up policy losses and advantage functions by name, and check their signatures.

A user's own function is `package.module:function`. Beyond the fixed arguments, its parameters are matched by name:
fields of `algorithm` (clip_low, …), `algorithm.loss_arguments` and `algorithm.advantage_arguments`, and for an
advantage function any per-row column of numbers in the batch.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlpack.algorithms import advantages, policy_loss
from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.parameters import check_limits, check_parameters, no_function_error
from rlpack.algorithms.policy_loss import PolicyLoss
from rlpack.algorithms.statistics import kl_cov
from rlpack.user_code import UserCode, describe_exception, import_user_module

LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo_clip": policy_loss.ppo_clip,
    "gspo": policy_loss.gspo,
    "gmpo": policy_loss.gmpo,
    "cispo": policy_loss.cispo,
    "sapo": policy_loss.sapo,
    "dppo_tv": policy_loss.dppo_tv,
    "dppo_kl": policy_loss.dppo_kl,
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
    """Return a loss function that can be called with `settings` and `arguments`.

    Raises:
        AlgorithmError: there is no such function, it lacks one of the arguments, or requires others.
    """
    function = _find("algorithm.loss", target, LOSSES)
    if target in LOSSES:
        check_limits("algorithm.loss", arguments)
    offered = {"tokens", "statistics", *settings}
    _check(function, "algorithm.loss", offered, arguments, target=target, positional=1)
    return function


def find_advantage(
    target: str, arguments: Mapping[str, Any], columns: Iterable[str] | None, settings: Iterable[str] = ()
) -> Callable[..., Tensor]:
    """Return an advantage function that can be called with `columns`, `settings` and `arguments`.

    Args:
        target: name of the function.
        arguments: `algorithm.advantage_arguments`.
        columns: names of per-row columns. If it is None, because they aren't known, only the arguments are checked.
        settings: names of keys of `algorithm`.

    Raises:
        AlgorithmError: there is no such function, it lacks one of the arguments, or requires others.
    """
    function = _find("algorithm.advantage", target, ADVANTAGES)
    if target in ADVANTAGES:
        check_limits("algorithm.advantage", arguments)
    offered = None if columns is None else {*columns, *settings}
    _check(function, "algorithm.advantage", offered, arguments, target=target, positional=0, settings=settings)
    return function


def advantage_parameters(target: str) -> set[str]:
    """Return the parameter names of the advantage function.

    Raises:
        AlgorithmError: there is no such function.
    """
    return set(inspect.signature(_find("algorithm.advantage", target, ADVANTAGES)).parameters)


def row_advantages(
    target: str, arguments: Mapping[str, Any], settings: Mapping[str, Any], columns: Mapping[str, Tensor]
) -> Tensor:
    """Return the advantage of each row, f32 [B]; 0 where not `valid`.

    Args:
        target: name of the function.
        arguments: `algorithm.advantage_arguments`.
        settings: fields of `algorithm`; the function gets those that are among its parameters.
        columns: per-row columns, [B] or [B, k]: `rewards`, `group_ids`, `valid`, and those that roles added.

    Raises:
        AlgorithmError: the function requires a missing column, or it does not return finite numbers of shape [B].
    """
    result, valid = call_advantage(target, arguments, settings, columns), columns["valid"]
    invalid = (valid & ~result.isfinite()).nonzero().flatten().tolist()
    if invalid:
        value = result[invalid[0]].item()
        raise AlgorithmError(f"algorithm.advantage {target!r} returned {value} for row {invalid[0]}; it must be finite")
    return torch.where(valid, result.detach(), 0.0).float()


def call_advantage(
    target: str, arguments: Mapping[str, Any], settings: Mapping[str, Any], columns: Mapping[str, Tensor]
) -> Tensor:
    """Return the result of an advantage function, a tensor [B] of any numbers; arguments as for `row_advantages`.

    Raises:
        AlgorithmError: the function requires a missing column, or it returns something else.
    """
    function = find_advantage(target, arguments, columns, settings)
    with UserCode(f"algorithm.advantage {target!r}", AlgorithmError):
        result = call_with(function, offered={**settings, **columns}, **arguments)
    shape = columns["rewards"].shape
    if not isinstance(result, Tensor) or result.shape != shape:
        kind = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise AlgorithmError(f"algorithm.advantage {target!r} returned {kind}; return a tensor {list(shape)}")
    return result


def call_with(function: Callable[..., Any], *positional: Any, offered: Mapping[str, Any], **arguments: Any) -> Any:
    """Call a function with all `arguments`, and with those of `offered` that match its parameters.

    Keywords that a `functools.partial` sets keep their values, unless `arguments` has them.
    """
    fixed = {*arguments, *(function.keywords if isinstance(function, functools.partial) else ())}
    parameters = inspect.signature(function).parameters
    matching = {name: offered[name] for name in parameters if name in offered and name not in fixed}
    return function(*positional, **matching, **arguments)


def _find(key: str, target: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if target in known:
        return known[target]
    module_name, _, name = target.partition(":")
    if not module_name or not name.isidentifier():
        raise AlgorithmError(f"{key} is {target!r}; set it to one of {', '.join(known)}, or to package.module:function")
    try:
        module = import_user_module(module_name)
    except Exception as error:  # importing a user's module runs it, which may raise anything
        reason = describe_exception(error)
        raise AlgorithmError(f"{key} is {target!r}, but {module_name} can't be imported: {reason}") from error
    function = vars(module).get(name)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
        raise no_function_error(key, target, functions)
    return function


def _check(
    function: Callable[..., Any],
    key: str,
    offered: Iterable[str] | None,
    arguments: Mapping[str, Any],
    *,
    target: str,
    positional: int,
    settings: Iterable[str] = (),
) -> None:
    """Raise an `AlgorithmError` if the function lacks an argument, or requires one that is not offered."""
    with UserCode(key, AlgorithmError):
        parameters = list(inspect.signature(function).parameters.values())
    check_parameters(parameters, key, offered, arguments, target=target, positional=positional, settings=settings)
