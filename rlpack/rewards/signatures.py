"""The calling conventions of reward functions, recognized by parameter names alone.

    f(prompts, completions, **columns) -> list[float | None]          `batched`: lists, one entry per row
    f(prompt, completion, **columns) -> float | None                  `single`: one row
    f(data_source, solution_str, ground_truth, extra_info) -> float   `verl`: verl's compute_score, one row

Each may be `async`. A function gets exactly the parameters it names; `prompts`, for example, may be left out. Columns
are the dataset's, plus `uid` and `finish_reason`; `**columns` receives all dataset columns.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from rlpack.rewards.errors import RewardError
from rlpack.user_code import UserCode, UserCodeError, describe_exception, import_user_module

RewardCallable = Callable[..., Any]
SignatureKind = Literal["batched", "single", "verl"]

_KINDS: tuple[SignatureKind, ...] = ("batched", "single", "verl")
_TEXTS: dict[SignatureKind, tuple[str, ...]] = {
    "batched": ("prompts", "completions"),
    "single": ("prompt", "completion"),
    "verl": ("data_source", "solution_str", "ground_truth"),
}
_EXAMPLES = "def f(prompts, completions, answer), def f(prompt, completion, answer) or verl's compute_score"
# Other libraries' and datasets' names for the column `answer`; `solution` would look like `completion`.
_ANSWERS = {"solution", "solutions", "ground_truth", "label", "labels", "target", "targets", "reference", "gold"}
# What functions call the columns that these keys name; columns that other keys name aren't passed.
_OWN_NAMES: dict[SignatureKind, dict[str, str]] = {
    "batched": {"data.prompt_column": "prompts", "data.answer_column": "answer"},
    "single": {"data.prompt_column": "prompt", "data.answer_column": "answer"},
    "verl": {"data.answer_column": "ground_truth"},
}
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class Signature:
    """How a function is called.

    Attributes:
        kind: `batched`, `single` or `verl`.
        texts: parameters of its convention that the function names, such as `prompts` and `completions`.
        columns: the function's other parameters, required and optional.
        takes_all: whether `**columns` receives every column.
        is_async: whether it is a coroutine function, whose rows run concurrently.
        name: the function's name in messages, as it was configured.
        required: parameters without a default.
    """

    kind: SignatureKind
    texts: tuple[str, ...]
    columns: tuple[str, ...]
    takes_all: bool
    is_async: bool
    name: str = ""
    required: tuple[str, ...] = ()

    def select_columns(self, names: Iterable[str], arguments: Iterable[str] = ()) -> list[str]:
        """Return the columns among `names` that the function is called with."""
        if self.kind == "verl":
            sources = ("data_source", "ground_truth", "answer", "extra_info", "reward_model")
            return [name for name in names if name in (*sources, *self.columns)]
        excluded = {"prompts", "completions", "prompt", "completion", *arguments}
        return [name for name in names if name not in excluded and (self.takes_all or name in self.columns)]


# The signature of a function that is imported and never called.
NEVER_CALLED = Signature("batched", (), (), takes_all=False, is_async=False)


def resolve(target: str, key: str = "reward.function") -> RewardCallable:
    """Import the function that `target`, "package.module:function", names.

    >>> resolve("rlpack.rewards.functions:exact_match").__name__
    'exact_match'

    Args:
        target: the function's name.
        key: the configuration key, for messages.

    Raises:
        RewardError: the name has another format, the module can't be imported, or it has no such function.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name.isidentifier():
        raise RewardError(f"{key} is {target!r}; write it as package.module:function")
    try:
        module = import_user_module(module_name)
    except Exception as error:  # importing a user's module can raise anything
        reason = describe_exception(error)
        raise RewardError(f"{key} is {target!r}, but {module_name} can't be imported: {reason}") from error
    try:
        with UserCode(f"{key} is {target!r}, and {module_name}", RewardError):
            function = getattr(module, name)
    except AttributeError as error:
        functions = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
        raise RewardError(
            f"{key} is {target!r}, but {module_name} has no {name}; its functions are: {functions or 'none'}"
        ) from error
    if not callable(function):
        raise RewardError(f"{key} is {target!r}, which is of type {type(function).__name__} and not a function")
    return function


def read_signature(function: RewardCallable, key: str = "reward.function") -> Signature:
    """Return how a function is called.

    >>> from rlpack.rewards.functions import exact_match
    >>> read_signature(exact_match).kind, read_signature(lambda completion: 1.0).kind
    ('batched', 'single')

    Args:
        function: follows one of the calling conventions.
        key: the configuration key that names it, for messages.

    Raises:
        RewardError: the function's parameters match no convention, or several.
    """
    parameters = _parameters(function, key)
    kind, texts = _match_kind(function, parameters, key)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"{key}={describe(function)} can't take {name!r} by keyword; remove the / from its signature"
            )
    columns = [name for name, parameter in parameters.items() if name not in texts and parameter.kind not in _VARIADIC]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    called = function if inspect.isroutine(function) else type(function).__call__
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC
    ]
    return Signature(kind, texts, tuple(columns), takes_all, is_async, describe(function), tuple(required))


def check_signature(
    signature: Signature,
    columns: Iterable[str],
    arguments: Mapping[str, Any],
    key: str = "reward.arguments",
    column_keys: Mapping[str, str] | None = None,
) -> None:
    """Raise unless a function can be called with these columns and arguments.

    Args:
        signature: how the function is called.
        columns: the columns that it can be passed.
        arguments: its configured arguments.
        key: the configuration key of the arguments, for messages.
        column_keys: the keys, such as `data.prompt_column`, that name further columns of the dataset, by column.

    Raises:
        RewardError: it needs a column that doesn't exist, or doesn't take an argument.
    """
    function_key = key.removesuffix("arguments") + "function"
    _check_arguments(signature, arguments, key)
    names = list(columns)
    missing = _missing_parameters(signature, set(names), set(arguments))
    if missing and column_keys and missing[0] in column_keys:
        use = _use_of_column(signature.kind, column_keys[missing[0]])
        raise RewardError(f"{function_key}={signature.name} needs {missing[0]!r}, which is {use}")
    if missing:
        of_answer = "did you mean 'answer'?" if "answer" in names else "set data.answer_column"
        suggestion = (
            (of_answer if missing[0] in {"answer", *_ANSWERS} else "")
            or _suggest(missing[0], {*signature.texts, *names} - {missing[0]})
            or f"add the column, or set {key}.{missing[0]}"
        )
        raise RewardError(
            f"{function_key}={signature.name} needs {missing[0]!r}; "
            + _offered(signature.kind, names, column_keys or {})
            + (f", and {key} has {sorted(arguments)}" if arguments else "")
            + f"; {suggestion}"
        )


def _offered(kind: SignatureKind, names: Iterable[str], column_keys: Mapping[str, str]) -> str:
    """Return what a function could name: the dataset's columns, and what is made from them and from responses.

    Args:
        kind: how the function is called.
        names: the columns that it can be passed.
        column_keys: see `check_signature`.
    """
    renamed = {column for column, key in column_keys.items() if key in ("data.answer_column", "data.prompt_column")}
    made = {"uid", "finish_reason", *(("answer",) if column_keys else ())}
    own = {*names} - made | renamed
    texts = {"single": ("prompt", "completion"), "batched": ("prompts", "completions"), "verl": ()}[kind]
    others = sorted({*texts, *names} - own)
    also = f" (also available: {', '.join(others)})" if others else ""
    return f"the dataset has the columns {sorted(own)}{also}"


def describe(function: RewardCallable) -> str:
    """Return the name by which the user configured `function`.

    >>> describe(resolve("rlpack.rewards.functions:exact_match"))
    'rlpack.rewards.functions:exact_match'
    """
    has_name = inspect.isfunction(function) or inspect.isclass(function) or inspect.isbuiltin(function)
    if has_name:
        return f"{function.__module__}:{function.__qualname__}"
    try:
        return repr(function)
    except BaseException:  # noqa: BLE001 - an object's __repr__ is user code
        return f"{type(function).__module__}:{type(function).__qualname__}"


def signature_from_json(value: object) -> Signature | None:
    """Return the signature in a decoded JSON message, None if it holds none.

    >>> value = {"kind": "batched", "texts": [], "columns": ["a"], "takes_all": False, "is_async": False}
    >>> signature_from_json({**value, "name": "mine:f", "required": []}).columns
    ('a',)
    """
    match value:
        case {
            "kind": ("batched" | "single" | "verl") as kind,
            "texts": [*texts],
            "columns": [*columns],
            "takes_all": bool(takes_all),
            "is_async": bool(is_async),
            "name": str(name),
            "required": [*required],
        } if all(isinstance(parameter, str) for parameter in (*texts, *columns, *required)):
            kind = cast(SignatureKind, kind)
            return Signature(kind, tuple(texts), tuple(columns), takes_all, is_async, name, tuple(required))
    return None


def _match_kind(
    function: RewardCallable, parameters: Mapping[str, inspect.Parameter], key: str
) -> tuple[SignatureKind, tuple[str, ...]]:
    """Return the kind of a function and the text parameters that it names."""
    texts = {kind: tuple(name for name in _TEXTS[kind] if name in parameters) for kind in _KINDS}
    kinds: list[SignatureKind] = [
        kind for kind in _KINDS if texts[kind] and (kind != "verl" or texts[kind] == _TEXTS[kind])
    ]
    if len(kinds) == 1:
        return kinds[0], texts[kinds[0]]
    mixed = " and ".join(f"{', '.join(texts[kind])} ({kind})" for kind in kinds)
    reason = f"mixes {mixed}" if kinds else "doesn't name the texts that it takes"
    raise RewardError(f"{key}={describe(function)} {reason}; write it as {_EXAMPLES}")


def _check_arguments(
    signature: Signature,
    arguments: Mapping[str, Any],
    key: str,
) -> None:
    """Check that the function takes the arguments, and none replaces a text."""
    parameters = (*signature.texts, *signature.columns)
    unknown = sorted(set(arguments) - set(parameters))
    if unknown and not signature.takes_all:
        hint = _suggest(unknown[0], parameters) or "remove it"
        raise RewardError(f"{key}.{unknown[0]} is not an argument of {signature.name}; {hint}")
    texts = sorted({*_TEXTS["batched"], *_TEXTS["single"], "solution_str"} & set(arguments))
    if texts:
        raise RewardError(f"{key}.{texts[0]} is filled from the response and can't be set; remove it")


def _missing_parameters(signature: Signature, columns: set[str], arguments: set[str]) -> list[str]:
    """Return the required parameters that neither texts, columns nor arguments provide."""
    provided = {*signature.texts, *columns, *arguments}
    if signature.kind == "verl":
        provided -= {"data_source", "ground_truth"} - columns - arguments
        provided.add("extra_info")  # verl itself passes None
        if {"answer", "reward_model"} & columns:
            provided.add("ground_truth")
    return [name for name in signature.required if name not in provided]


def _use_of_column(kind: SignatureKind, key: str) -> str:
    """Return how functions read the column that `key` names, for messages."""
    if key in _OWN_NAMES[kind]:
        return f"{key}; call the parameter {_OWN_NAMES[kind][key]!r}"
    functions = "functions like verl's compute_score" if key in _OWN_NAMES["single"] else "reward functions"
    return f"{key} and isn't passed to {functions}; remove the parameter, or copy the column under another name"


def _suggest(name: str, names: Iterable[str]) -> str:
    """Return a "did you mean" question, empty if no name is similar."""
    similar = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {similar[0]!r}?" if similar else ""


def _parameters(function: RewardCallable, key: str) -> Mapping[str, inspect.Parameter]:
    try:
        with UserCode("its __signature__"):
            return inspect.signature(function).parameters
    except (ValueError, TypeError, UserCodeError) as error:  # some functions written in C
        reason = f"{describe(function)} has no readable signature ({describe_exception(error)})"
        raise RewardError(f"{key}={reason}; write it as {_EXAMPLES}") from error
