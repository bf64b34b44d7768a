"""Find a reward function by its name, call it, and check what it returns, so that a bad reward never reaches a loss."""

import importlib
import inspect
import logging
import math
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rlpack
from rlpack.rewards.errors import RewardError

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Scores:
    """The rewards of a batch.

    Attributes:
        values: f32 [B]; 0 where quarantined.
        quarantined: rows without a usable reward, bool [B]; they take no part in advantages.
        counts: how many rows are quarantined for each reason: `none`, `nan`, `infinite`.
    """

    values: Tensor
    quarantined: Tensor
    counts: dict[str, int]


def resolve(target: str) -> RewardFunction:
    """Return the function that `target`, "package.module:function", names.

    >>> resolve("rlpack.rewards.functions:exact_match").__name__
    'exact_match'

    Raises:
        RewardError: the form is another, the module can't be imported, or it has no such function.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name.isidentifier():
        raise RewardError(f"reward.function is {target!r}; its form is package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a user's module runs it: anything may come
        reason = f"{type(error).__name__}: {error}"
        raise RewardError(f"reward.function is {target!r}, and {module_name} can't be imported: {reason}") from error
    try:
        function = getattr(module, name)
    except AttributeError as error:
        functions = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
        raise RewardError(
            f"reward.function is {target!r}, and {module_name} has no {name}; its functions are: {functions or 'none'}"
        ) from error
    if not callable(function):
        raise RewardError(f"reward.function is {target!r}, which is a {type(function).__name__} and not a function")
    return function


def call_reward(
    function: RewardFunction,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    arguments: Mapping[str, Any],
) -> Scores:
    """Return what `function` says of the completions, with rows quarantined whose reward is no finite number.

    True and False are 1 and 0. Quarantined rows are spoken of in the log, with how many there are for which reason.
    The function gets copies of the lists, so it can't change the batch. It is given the columns that its signature
    names, or all of them when it takes `**columns`.

    >>> scores = call_reward(lambda prompts, completions: [1, float("nan")], ["a", "b"], ["c", "d"], {}, {})
    >>> scores.values, scores.quarantined, scores.counts
    (tensor([1., 0.]), tensor([False,  True]), {'nan': 1})

    Args:
        function: see `rlpack.rewards.functions`.
        prompts: texts, B.
        completions: texts, B.
        columns: the dataset's columns by name, B entries each; only those that the function is given are read.
        arguments: `reward.arguments`.

    Raises:
        RewardError: the function can't take what it is given, raises, or returns another number of rewards than rows,
            or something that is no list of numbers.
    """
    name = describe(function)
    keywords = _keywords(function, columns, arguments)
    try:
        rewards = function(prompts=list(prompts), completions=list(completions), **keywords)
    except Exception as error:  # a user's function may raise anything
        place = _place(error)
        raise RewardError(f"reward function {name} raised {type(error).__name__}: {error}{place}") from error
    if inspect.iscoroutine(rewards):
        rewards.close()
        raise RewardError(f"reward function {name} is a coroutine; write it without async")
    if not isinstance(rewards, list | tuple | np.ndarray):
        raise RewardError(f"reward function {name} returned a {type(rewards).__name__}; return a list of numbers")
    if len(rewards) != len(completions):
        raise RewardError(
            f"reward function {name} returned {len(rewards)} rewards for {len(completions)} rows; return one a row"
        )
    problems = [_problem(reward, row, name) for row, reward in enumerate(rewards)]
    values = [0.0 if problem else float(reward) for reward, problem in zip(rewards, problems, strict=True)]
    counts = dict(Counter(problem for problem in problems if problem))
    _warn_of_quarantine(name, counts, len(problems))
    return Scores(
        values=torch.tensor(values, dtype=torch.float32),
        quarantined=torch.tensor([problem is not None for problem in problems], dtype=torch.bool),
        counts=counts,
    )


def check_signature(function: RewardFunction, columns: Iterable[str], arguments: Mapping[str, Any]) -> None:
    """Check, without calling it, that a reward function can take columns of these names and `reward.arguments`.

    Raises:
        RewardError: it can't take prompts and completions, needs a column that isn't there, or an argument isn't its.
    """
    _keywords(function, dict.fromkeys(columns, ()), arguments)


def describe(function: RewardFunction) -> str:
    """Return the name that a user knows `function` by.

    >>> describe(resolve("rlpack.rewards.functions:exact_match"))
    'rlpack.rewards.functions:exact_match'
    """
    named = inspect.isfunction(function) or inspect.isclass(function) or inspect.isbuiltin(function)
    return f"{function.__module__}:{function.__qualname__}" if named else repr(function)


def _keywords(
    function: RewardFunction, columns: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the columns and arguments that `function` is called with."""
    signature = _signature(function)
    parameters = signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = sorted(set(arguments) - set(parameters))
    if unknown and not takes_all:
        raise RewardError(f"reward.arguments.{unknown[0]} is not an argument of {describe(function)}; remove it")
    asked = [name for name in columns if takes_all or name in parameters]
    given = {name: list(columns[name]) for name in asked if name not in ("prompts", "completions")} | dict(arguments)
    free = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in free
        and name not in ("prompts", "completions", *given)
    ]
    if missing:
        raise RewardError(
            f"reward function {describe(function)} needs {missing[0]!r}; the dataset has the columns "
            f"{sorted(columns)}, and reward.arguments gives {sorted(arguments)}"
        )
    return given


def _signature(function: RewardFunction) -> inspect.Signature:
    """Return the signature of a function that takes `prompts` and `completions` by name."""
    form = "write it as def score(prompts, completions, answer, **columns)"
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # some functions written in C
        raise RewardError(f"reward function {describe(function)} doesn't say what it takes; {form}") from error
    try:
        signature.bind_partial(prompts=(), completions=())
    except TypeError as error:
        raise RewardError(f"reward function {describe(function)} can't take the texts: {error}; {form}") from error
    return signature


def _warn_of_quarantine(name: str, counts: Mapping[str, int], num_rows: int) -> None:
    """Say how many rows of a batch have no usable reward, and that nothing trains where that is all of them."""
    quarantined = sum(counts.values())
    if not quarantined:
        return
    reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))
    rows = f"all {num_rows}" if quarantined == num_rows else f"{quarantined} of {num_rows}"
    way_out = "none of them trains; return finite numbers" if quarantined == num_rows else "they don't train"
    logger.warning("reward function %s: %s rows are quarantined (%s); %s", name, rows, reasons, way_out)


def _place(error: BaseException) -> str:
    """Return where an exception comes from, in the last line of a user's own code: not of rlpack, not of a package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_rlpacks(frame.filename)]
    own = [frame for frame in frames if "site-packages" not in frame.filename and not _is_pythons(frame.filename)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _is_rlpacks(file: str) -> bool:
    return Path(file).is_relative_to(Path(rlpack.__file__).parent)


def _is_pythons(file: str) -> bool:
    return file.startswith("<") or Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def _problem(reward: object, row: int, name: str) -> str | None:
    """Return why a reward can't be used, None if it can."""
    if reward is None:
        return "none"
    if not isinstance(reward, Real | np.bool_):
        kind = type(reward).__name__
        raise RewardError(f"reward function {name} gave row {row} a {kind}; a reward is a number, or None")
    try:
        value = float(reward)
    except OverflowError:  # an int beyond float64
        return "infinite"
    if math.isnan(value):
        return "nan"
    # Beyond float32 a reward would become infinite on its way into the batch.
    return "infinite" if abs(value) > _LARGEST else None
