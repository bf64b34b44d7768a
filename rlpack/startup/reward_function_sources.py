"""Read how reward functions are called from their source files, without importing them.

Where a job is submitted, packages that they import may be missing. A function is judged only if its parameters are
certain: a plain function statement in a file that can be found without importing a package.
"""

import ast
from inspect import Parameter, Signature
from typing import Any

from rlpack.config import evaluation_sets
from rlpack.config.roles import calls_reward_functions, started_roles
from rlpack.config.schema import Config
from rlpack.rewards.errors import RewardError
from rlpack.rewards.signatures import Signature as RewardSignature
from rlpack.rewards.signatures import read_signature
from rlpack.startup.function_sources import parameters_of
from rlpack.startup.user_sources import Uncertain, count_bindings, parse_module, words_of


class _UnimportedFunction:
    """The name and the parameters of a function, which are inspected; it is never called."""

    def __init__(self, target: str, parameters: list[Parameter]) -> None:
        self._target = target
        self.__signature__ = Signature(parameters)

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{self._target} is only inspected")

    def __repr__(self) -> str:
        return self._target


def check_reward_sources(config: Config) -> None:
    """Raise if a reward function certainly doesn't exist, or follows no calling convention.

    Raises:
        RewardError: names the key, and the problem of the function.
    """
    if "reward" not in started_roles(config):
        return
    functions = {f"reward.functions.{name}.function": one.function for name, one in config.reward.functions.items()}
    functions = functions or {"reward.function": config.reward.function}
    are_called = calls_reward_functions(config)
    for key, target in (functions | evaluation_sets.reward_functions(config)).items():
        signature_in_source(key, target, are_called=are_called)


def signature_in_source(key: str, target: str, *, are_called: bool = True) -> RewardSignature | None:
    """Return how a reward function is called; None if its source doesn't tell, or it is never called.

    Args:
        key: the configuration key that names it, for messages.
        target: package.module:function.
        are_called: whether a reward pool will call it; otherwise its parameters are not checked.

    Raises:
        RewardError: its module can't be parsed or has no such function, or its parameters match no convention.
    """
    module, _, name = target.partition(":")
    if not module or not name.isidentifier():
        raise RewardError(f"{key} is {target!r}; write it as package.module:function")
    try:
        tree = parse_module(module)
    except Uncertain:
        return None
    except SyntaxError as error:
        raise RewardError(f"{key} is {target!r}, but {module} can't be imported: SyntaxError: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if name not in words_of(tree):
        names = ", ".join(node.name for node in functions if not node.name.startswith("_"))
        raise RewardError(f"{key} is {target!r}, but {module} has no {name}; its functions are: {names or 'none'}")
    for node in functions if are_called else ():
        if node.name == name and not node.decorator_list and count_bindings(tree, name) == 1:
            return read_signature(_UnimportedFunction(target, parameters_of(node.args)), key)
    return None
