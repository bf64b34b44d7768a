"""What is looked at in a role's class before any process starts: a rank that can't build or call it costs minutes."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlpack.config.roles import is_builtin
from rlpack.config.schema import Role, builtin_roles
from rlpack.distributed.dispatch import dispatch_of, is_dispatched
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.process import load_class
from rlpack.worker import Trainable, Worker

_SCORES = (
    "a custom role derives from rlpack.worker.Worker and scores rollouts with `@sharded() def score(self, shard)`; see "
    "workers/reward.py"
)
_BUILT = "write it as `@classmethod def from_settings(cls, context, config, tokenizer, **arguments)`"


def check_role(name: str, role: Role) -> None:
    """Load a role's class and see that it can be built with its arguments; a user's own has to be one that scores.

    Raises:
        PlacementError: names the role's key, what is wrong with the class, and what a role looks like.
    """
    try:
        kind = load_class(role.target)
    except PlacementError as error:
        raise PlacementError(f"roles.{name}.target: {error}") from error
    where = f"roles.{name}.target is {role.target!r}"
    standard = load_class(builtin_roles()[name].target) if is_builtin(name) else None
    if standard is None or (kind is not standard and "score" in _called(standard)):
        _check_score(where, kind)
    elif kind is not standard:
        _check_stands_in(where, kind, standard)
    _check_built(name, where, kind, role.arguments)


def _check_score(where: str, kind: type[Any]) -> None:
    """See that a session can call a class as a role that scores."""
    for method in ("from_settings", "score"):
        if not _has(kind, method):
            raise PlacementError(f"{where}, which has no method {method}; {_SCORES}")
    try:
        dispatch = dispatch_of(kind.score)
    except TypeError as error:
        raise PlacementError(f"{where}: {error}; {_SCORES}") from error
    if dispatch.kind != "sharded":
        raise PlacementError(f"{where}, whose score is {dispatch.kind}; {_SCORES}")
    if dispatch.merge is not None:
        raise PlacementError(f"{where}, whose score has a merge, and rewards are put in order by rows; {_SCORES}")
    if inspect.iscoroutinefunction(kind.score) or inspect.isgeneratorfunction(kind.score):
        what = "a coroutine" if inspect.iscoroutinefunction(kind.score) else "a generator"
        raise PlacementError(f"{where}, whose score is {what}; write it without async and yield; {_SCORES}")
    if problem := _why_not(inspect.signature(kind.score).bind, "self", "shard"):
        raise PlacementError(f"{where}, whose score can't be called with a shard: {problem}; {_SCORES}")


def _check_stands_in(where: str, kind: type[Any], standard: type[Any]) -> None:
    """See that a class has the methods of the built-in role that it is to replace."""
    if not _has(kind, "from_settings"):
        raise PlacementError(f"{where}, which has no method from_settings; {_BUILT}")
    if missing := sorted(_called(standard) - _called(kind)):
        raise PlacementError(
            f"{where}, which has no decorated method {missing[0]}; in the place of {standard.__name__} "
            f"a class has {', '.join(sorted(_called(standard)))}: derive from it"
        )
    if issubclass(standard, Trainable) and not issubclass(kind, Trainable):
        raise PlacementError(f"{where}, which does not derive from rlpack.worker.Trainable, so it would not be saved")


def _called(kind: type[Any]) -> set[str]:
    """Return the methods of a class that a driver can call."""
    return {
        name for name in dir(kind) if inspect.isfunction(getattr(kind, name)) and is_dispatched(getattr(kind, name))
    }


def _check_built(name: str, where: str, kind: type[Any], arguments: Mapping[str, Any]) -> None:
    """See that a rank can build the class: by a `from_settings` of its own, or by its `__init__` as `Worker`'s does."""
    static = inspect.getattr_static(kind, "from_settings")
    own = static is not vars(Worker)["from_settings"]
    if not isinstance(static, classmethod | staticmethod):
        raise PlacementError(f"{where}, whose from_settings is no class method; {_BUILT}")
    given = ("context", "config", "tokenizer") if own else ("context",)
    builder, called = (kind.from_settings, "from_settings") if own else (kind, "__init__")
    signature = inspect.signature(builder)
    if problem := _why_not(signature.bind_partial, *given):
        form = _BUILT if own else "take the context first, or override from_settings"
        raise PlacementError(f"{where}, whose {called} can't be called with {', '.join(given)}: {problem}; {form}")
    if problem := _why_not(signature.bind, *given, **arguments):
        key, further = f"roles.{name}.arguments", list(signature.parameters.values())[len(given) :]
        raise PlacementError(
            f"{where}, whose {called} can't be called with what {key} gives ({', '.join(arguments) or 'nothing'}): "
            f"{problem}; {key} can give {', '.join(map(str, further)) or 'nothing'}"
        )


def _why_not(bind: Callable[..., Any], *given: str, **arguments: Any) -> str:
    """Return why a signature doesn't take this, nothing when it does."""
    try:
        bind(*given, **arguments)
    except TypeError as error:
        return str(error)
    return ""


def _has(kind: type[Any], method: str) -> bool:
    return any(method in vars(parent) for parent in kind.__mro__)
