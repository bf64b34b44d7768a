"""The forms that a reward function may have, told by the names in its signature and by nothing else.

    f(prompts, completions, **columns) -> list[float | None]          `batched`: lists, one entry a row
    f(prompt, completion, **columns) -> float | None                  `single`: one row
    f(data_source, solution_str, ground_truth, extra_info) -> float   `verl`: verl's compute_score, one row

Each may be `async`. A function gets what its signature names and nothing else: not every one needs `prompts`. Columns
are the dataset's, `uid` and `finish_reason` on demand; `**columns` takes them all.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from rlpack.rewards.errors import RewardError

RewardFunction = Callable[..., Any]
Kind = Literal["batched", "single", "verl"]

_KINDS: tuple[Kind, ...] = ("batched", "single", "verl")
_TEXTS: dict[Kind, tuple[str, ...]] = {
    "batched": ("prompts", "completions"),
    "single": ("prompt", "completion"),
    "verl": ("data_source", "solution_str", "ground_truth"),
}
_FORMS = "def f(prompts, completions, answer), def f(prompt, completion, answer) or verl's compute_score"
_FREE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class Form:
    """How a function is called.

    Attributes:
        kind: `batched`, `single` or `verl`.
        texts: which of its form's texts it names.
        columns: further parameters that have to be given, and those that may be.
        takes_all: whether it takes any column, by `**columns`.
        is_async: whether it is a coroutine function: its rows are worked on at one time.
    """

    kind: Kind
    texts: tuple[str, ...]
    columns: tuple[str, ...]
    takes_all: bool
    is_async: bool

    def wants(self, names: Iterable[str], arguments: Iterable[str] = ()) -> list[str]:
        """Return those of the columns `names` that it is called with."""
        if self.kind == "verl":
            sources = ("data_source", "ground_truth", "answer", "extra_info", "reward_model")
            return [name for name in names if name in (*sources, *self.columns)]
        given = {"prompts", "completions", "prompt", "completion", *arguments}
        return [name for name in names if name not in given and (self.takes_all or name in self.columns)]


def resolve(target: str, key: str = "reward.function") -> RewardFunction:
    """Return the function that `target`, "package.module:function", names.

    >>> resolve("rlpack.rewards.functions:exact_match").__name__
    'exact_match'

    Args:
        target: the function's name.
        key: of the configuration, for messages.

    Raises:
        RewardError: the form is another, the module can't be imported, or it has no such function.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name.isidentifier():
        raise RewardError(f"{key} is {target!r}; its form is package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a user's module runs it: anything may come
        reason = f"{type(error).__name__}: {error}"
        raise RewardError(f"{key} is {target!r}, and {module_name} can't be imported: {reason}") from error
    try:
        function = getattr(module, name)
    except AttributeError as error:
        functions = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
        raise RewardError(
            f"{key} is {target!r}, and {module_name} has no {name}; its functions are: {functions or 'none'}"
        ) from error
    if not callable(function):
        raise RewardError(f"{key} is {target!r}, which is a {type(function).__name__} and not a function")
    return function


def form_of(function: RewardFunction, key: str = "reward.function") -> Form:
    """Return the form of a function.

    >>> from rlpack.rewards.functions import exact_match
    >>> form_of(exact_match).kind, form_of(lambda completion: 1.0).kind
    ('batched', 'single')

    Args:
        function: in one of the forms.
        key: of the configuration that names it, for messages.

    Raises:
        RewardError: its signature names the texts of no form, or of two.
    """
    parameters = _parameters(function, key)
    named = {kind: tuple(name for name in _TEXTS[kind] if name in parameters) for kind in _KINDS}
    found = [kind for kind in _KINDS if named[kind] and (kind != "verl" or named[kind] == _TEXTS[kind])]
    if len(found) != 1:
        kinds = " and ".join(f"{', '.join(named[kind])} ({kind})" for kind in found)
        why = f"names {kinds}, which are of several forms" if found else "doesn't say which texts it takes"
        raise RewardError(f"{key}={describe(function)} {why}; write it as {_FORMS}")
    kind = cast(Kind, found[0])
    bare = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_ONLY]
    if bare:
        raise RewardError(
            f"{key}={describe(function)} can't take {bare[0]!r} by its name; remove the / from its signature"
        )
    columns = [
        name for name, parameter in parameters.items() if name not in named[kind] and parameter.kind not in _FREE
    ]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    called = function if inspect.isroutine(function) else type(function).__call__
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    return Form(kind, named[kind], tuple(columns), takes_all, is_async)


def check_signature(
    function: RewardFunction,
    columns: Iterable[str],
    arguments: Mapping[str, Any],
    key: str = "reward.arguments",
) -> Form:
    """Return the form of a function that can be called with columns of these names and these arguments.

    Raises:
        RewardError: it has no form, needs a column that isn't there, or an argument isn't its.
    """
    named = key.removesuffix("arguments") + "function"
    form, parameters, names = form_of(function, named), _parameters(function, named), list(columns)
    unknown = sorted(set(arguments) - set(parameters))
    if unknown and not form.takes_all:
        hint = _near(unknown[0], parameters) or "remove it"
        raise RewardError(f"{key}.{unknown[0]} is not an argument of {describe(function)}; {hint}")
    texts = sorted({*_TEXTS["batched"], *_TEXTS["single"], "solution_str"} & set(arguments))
    if texts:
        raise RewardError(f"{key}.{texts[0]} is what a response says, and can't be given; remove it")
    given = {*form.texts, *names, *arguments}
    if form.kind == "verl":
        given -= {"data_source", "ground_truth"} - {*names, *arguments}
        if "answer" in names or "reward_model" in names:
            given.add("ground_truth")
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _FREE and name not in given
    ]
    if form.kind == "verl" and "extra_info" in missing:
        missing.remove("extra_info")  # verl itself gives None
    if missing:
        raise RewardError(
            f"{named}={describe(function)} needs {missing[0]!r}; the dataset has the columns {sorted(names)}, and "
            f"{key} gives {sorted(arguments)}; {_near(missing[0], [*form.texts, *names]) or f'give it by {key}'}"
        )
    return form


def describe(function: RewardFunction) -> str:
    """Return the name that a user knows `function` by.

    >>> describe(resolve("rlpack.rewards.functions:exact_match"))
    'rlpack.rewards.functions:exact_match'
    """
    named = inspect.isfunction(function) or inspect.isclass(function) or inspect.isbuiltin(function)
    return f"{function.__module__}:{function.__qualname__}" if named else repr(function)


def parsed_form(told: object) -> Form | None:
    """Return the form that a process told as JSON, None when it is none.

    >>> parsed_form({"kind": "batched", "texts": [], "columns": ["a"], "takes_all": False, "is_async": False}).columns
    ('a',)
    """
    match told:
        case {
            "kind": ("batched" | "single" | "verl") as kind,
            "texts": [*texts],
            "columns": [*columns],
            "takes_all": bool(takes_all),
            "is_async": bool(is_async),
        } if all(isinstance(name, str) for name in (*texts, *columns)):
            return Form(cast(Kind, kind), tuple(texts), tuple(columns), takes_all, is_async)
    return None


def _near(name: str, names: Iterable[str]) -> str:
    """Return a question after the name that was meant, empty where there is none like it."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def _parameters(function: RewardFunction, key: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError) as error:  # some functions written in C
        raise RewardError(f"{key}={describe(function)} doesn't say what it takes; write it as {_FORMS}") from error
