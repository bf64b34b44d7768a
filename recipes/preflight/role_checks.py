"""Role checks: can ranks build a role's class, and can the driver call its methods?"""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from rlpack.config.roles import is_builtin
from rlpack.config.schema import Role, builtin_roles
from rlpack.distributed.dispatch import dispatch_of, is_dispatched, own_version
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.process import load_class
from rlpack.startup.annotations import is_wrong
from rlpack.startup.role_sources import SCORING_ROLE
from rlpack.worker import Trainable, Worker

logger = logging.getLogger(__name__)

_DERIVE = "derive from rlpack.worker.Trainable and define save, load and export_model with @broadcast"
_BUILD = "write it as `@classmethod def from_settings(cls, context, config, tokenizer, **arguments)`"


def check_role(name: str, role: Role, *, is_own: bool = False, is_trained: bool = False) -> None:
    """Raise unless a role's class can be loaded, built with its arguments, and called.

    A role that users add has to be a scoring role.

    Args:
        name: name of the role.
        role: the role's section of the configuration.
        is_own: whether the role is one of the recipe's own, which only the recipe calls.
        is_trained: whether the recipe trains the role.

    Raises:
        PlacementError: names the role's key, what is wrong with the class, and what a role looks like.
    """
    try:
        kind = load_class(role.target)
    except PlacementError as error:
        raise PlacementError(f"roles.{name}.target: {error}") from error
    where = f"roles.{name}.target is {role.target!r}"
    standard = load_class(builtin_roles()[name].target) if is_builtin(name) else None
    _check_trained(name, where, kind, is_trained=is_trained)
    if is_own:
        _check_own(where, kind)
    elif standard is None or (kind is not standard and "score" in _called(standard)):
        _check_score(where, kind)
    elif kind is not standard:
        _check_replacement(where, kind, standard)
    _check_built(name, where, kind, role.arguments)


def _check_own(where: str, kind: type[Any]) -> None:
    """Check that a recipe can use this class as one of its own roles."""
    if not _has(kind, "from_settings"):
        raise PlacementError(f"{where}, which has no method from_settings; derive it from rlpack.worker.Worker")
    if not _called(kind):
        raise PlacementError(
            f"{where}, which has no method that a recipe can call; decorate one with @sharded, @broadcast or @rank_zero"
        )
    for method in sorted(_called(kind)):
        try:
            own_version(kind, getattr(kind, method))
        except (AttributeError, TypeError) as error:
            raise PlacementError(f"{where}: {error}") from error


def _check_trained(name: str, where: str, kind: type[Any], *, is_trained: bool) -> None:
    """Raise unless a trained role can be saved, loaded and exported; warn about one that the recipe doesn't train."""
    if not issubclass(kind, Trainable):
        if is_trained:
            missing = sorted(Trainable.__abstractmethods__ - _called(kind))
            lacks = f" and has no decorated method {', '.join(missing)}" if missing else ""
            raise PlacementError(
                f"{where}; the recipe trains the role {name}, but {kind.__qualname__} does not derive from "
                f"rlpack.worker.Trainable{lacks}, so it would not be saved; {_DERIVE}"
            )
    elif not is_trained:
        logger.warning(
            "%s, a Trainable, but the recipe doesn't train the role %s: checkpoints don't hold it; to save it, name it "
            "in RecipeSpec.trains of your own recipe",
            where,
            name,
        )
    elif missing := sorted(kind.__abstractmethods__):
        raise PlacementError(
            f"{where}; the recipe trains the role {name}, but {kind.__qualname__} does not define "
            f"{', '.join(missing)}; {_DERIVE}"
        )


def _check_score(where: str, kind: type[Any]) -> None:
    """Raise unless a session can call a class as a scoring role."""
    for method in ("from_settings", "score"):
        if not _has(kind, method):
            raise PlacementError(f"{where}, which has no method {method}; {SCORING_ROLE}")
    try:
        dispatch = dispatch_of(kind.score)
    except TypeError as error:
        raise PlacementError(f"{where}: {error}; {SCORING_ROLE}") from error
    if dispatch.kind != "sharded":
        raise PlacementError(f"{where}, whose score is {dispatch.kind}; {SCORING_ROLE}")
    if dispatch.merge is not None:
        raise PlacementError(f"{where}, whose score has a merge, but rewards are restored by rows; {SCORING_ROLE}")
    if inspect.iscoroutinefunction(kind.score) or inspect.isgeneratorfunction(kind.score):
        what = "a coroutine" if inspect.iscoroutinefunction(kind.score) else "a generator"
        raise PlacementError(f"{where}, whose score is {what}; write it without async and yield; {SCORING_ROLE}")
    if problem := _bind_problem(inspect.signature(kind.score).bind, "self", "shard"):
        raise PlacementError(f"{where}, whose score can't be called with a shard: {problem}; {SCORING_ROLE}")


def _check_replacement(where: str, kind: type[Any], standard: type[Any]) -> None:
    """Raise unless a class has the methods of the built-in role that it replaces."""
    if not _has(kind, "from_settings"):
        raise PlacementError(f"{where}, which has no method from_settings; {_BUILD}")
    if missing := sorted(_called(standard) - _called(kind)):
        raise PlacementError(
            f"{where}, which has no decorated method {missing[0]}; a replacement of {standard.__name__} needs "
            f"{', '.join(sorted(_called(standard)))}: derive from it"
        )


def _called(kind: type[Any]) -> set[str]:
    """Return the names of the methods that the driver can call."""
    return {
        name for name in dir(kind) if inspect.isfunction(getattr(kind, name)) and is_dispatched(getattr(kind, name))
    }


def _check_built(name: str, where: str, kind: type[Any], arguments: Mapping[str, Any]) -> None:
    """Raise unless a rank can build the class by `from_settings` or `__init__`."""
    static = inspect.getattr_static(kind, "from_settings")
    overridden = static is not vars(Worker)["from_settings"]
    if not isinstance(static, classmethod | staticmethod):
        raise PlacementError(f"{where}, whose from_settings is not a class method; {_BUILD}")
    positional = ("context", "config", "tokenizer") if overridden else ("context",)
    builder, name_of_builder = (kind.from_settings, "from_settings") if overridden else (kind, "__init__")
    signature = inspect.signature(builder)
    if problem := _bind_problem(signature.bind_partial, *positional):
        form = _BUILD if overridden else "take the context first, or override from_settings"
        names = ", ".join(positional)
        raise PlacementError(f"{where}, whose {name_of_builder} can't be called with {names}: {problem}; {form}")
    if problem := _bind_problem(signature.bind, *positional, **arguments):
        key, accepted = f"roles.{name}.arguments", list(signature.parameters.values())[len(positional) :]
        raise PlacementError(
            f"{where}, whose {name_of_builder} can't be called with {key} ({', '.join(arguments) or 'none'}): "
            f"{problem}; it takes {', '.join(map(str, accepted)) or 'no arguments'}"
        )
    for argument, value in arguments.items():
        parameter = signature.parameters.get(argument)
        if parameter is None or parameter.kind is parameter.VAR_KEYWORD:
            continue
        annotation = parameter.annotation
        if is_wrong(value, annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)):
            raise PlacementError(
                f"{where}, whose {name_of_builder} can't be called with roles.{name}.arguments.{argument}={value!r}; "
                f"it takes {parameter}"
            )


def _bind_problem(bind: Callable[..., Any], *positional: str, **arguments: Any) -> str:
    """Return why a signature doesn't accept the arguments; empty if it does."""
    try:
        bind(*positional, **arguments)
    except TypeError as error:
        return str(error)
    return ""


def _has(kind: type[Any], method: str) -> bool:
    return any(method in vars(parent) for parent in kind.__mro__)
