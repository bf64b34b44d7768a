"""Check the parameters of the loss and of the advantage function in their source files.

Importing them imports PyTorch, which takes seconds. A user's function is checked only if its parameters are certain: a
plain function statement in a file that can be found without importing a package.
"""

import ast
from collections.abc import Iterable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any

import rlpack
from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.parameters import ROW_COLUMNS, check_limits, check_parameters, no_function_error
from rlpack.config.recipes import recipe_of
from rlpack.config.roles import started_roles
from rlpack.config.schema import Config, builtin_roles
from rlpack.startup.annotations import is_wrong
from rlpack.startup.user_sources import Uncertain, count_bindings, parse_module, words_of

# The files of the built-in functions.
_FILES = tuple(f"algorithms/{name}.py" for name in ("policy_loss", "statistics", "advantages"))
# Stands for a default, whose value isn't evaluated.
_SOME_DEFAULT = object()


def check_function_sources(config: Config) -> None:
    """Raise if the loss or the advantage function certainly doesn't exist, or can't be called as configured.

    Raises:
        AlgorithmError: names the key, and the problem of the function or of an argument.
    """
    spec, settings = recipe_of(config), config.algorithm
    if not spec.generates:
        return
    offered = {"tokens", "statistics", *dict(settings)}
    _check("algorithm.loss", settings.loss, offered, settings.loss_arguments, positional=1)
    if uses_advantage(config):
        check_not_columns(settings.advantage_arguments)
        names, key = advantage_columns(config), "algorithm.advantage"
        _check(
            key, settings.advantage, names, settings.advantage_arguments, positional=0, settings=dict(config.algorithm)
        )


def uses_advantage(config: Config) -> bool:
    """Return whether the recipe calls the advantage function."""
    return "algorithm.advantage" not in recipe_of(config).ignores


def check_not_columns(arguments: Mapping[str, Any]) -> None:
    """Raise if an argument would replace one of the columns that every advantage function can name.

    Raises:
        AlgorithmError: names the argument.
    """
    for name in sorted(arguments.keys() & set(ROW_COLUMNS)):
        raise AlgorithmError(
            f"algorithm.advantage_arguments.{name} would replace the column {name!r} of the batch; remove it"
        )


def advantage_columns(config: Config) -> set[str] | None:
    """Return the names of the arguments that an advantage function gets if it has such parameters.

    None if that isn't known, because a user's role may add any column.
    """
    roles, built_in = started_roles(config), {role.target for role in builtin_roles().values()}
    if any(config.roles[name].target not in built_in for name in roles):
        return None
    scorers = [name for name in ("reward", "reward_model") if name in roles]
    added = [f"reward_{name}" for name in config.reward.functions]
    added += [f"rewards_of_{name}" for name in scorers if len(scorers) > 1]
    added += recipe_of(config).advantage_columns
    added += ["kl_sum"] if "reference" in roles else []
    return {*ROW_COLUMNS, *added, *dict(config.algorithm)}


def _check(
    key: str,
    target: str,
    offered: set[str] | None,
    arguments: Mapping[str, Any],
    *,
    positional: int,
    settings: Iterable[str] = (),
) -> None:
    """Check one function."""
    try:
        definition = _users(key, target) if ":" in target else _built_in(target)
    except Uncertain:
        return
    parameters = parameters_of(definition.args)
    check_parameters(parameters, key, offered, arguments, target=target, positional=positional, settings=settings)
    if ":" in target:
        return
    check_limits(key, arguments)
    for parameter in (*definition.args.args, *definition.args.kwonlyargs):
        annotation = ast.unparse(parameter.annotation) if parameter.annotation is not None else ""
        value = arguments.get(parameter.arg)
        if is_wrong(value, annotation):
            raise AlgorithmError(f"{key}_arguments.{parameter.arg} is {value!r}; it must be {annotation}")


def _built_in(name: str) -> ast.FunctionDef:
    """Return the function statement of a built-in function."""
    for file in _FILES:
        tree = ast.parse((Path(rlpack.__file__).parent / file).read_bytes())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
    raise Uncertain


def _users(key: str, target: str) -> ast.FunctionDef:
    """Return the function statement of a user's function.

    Raises:
        Uncertain: it may have other parameters.
        AlgorithmError: its module can't be parsed, or has no such function.
    """
    module, _, name = target.partition(":")
    try:
        tree = parse_module(module)
    except SyntaxError as error:
        raise AlgorithmError(f"{key} is {target!r}, but {module} can't be imported: SyntaxError: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name not in words_of(tree):
        raise no_function_error(key, target, (node.name for node in functions if node.name[0] != "_"))
    for node in functions:
        if node.name == name and not node.decorator_list and count_bindings(tree, name) == 1:
            return node
    raise Uncertain


def parameters_of(arguments: ast.arguments) -> list[Parameter]:
    """Return the parameters of a function statement, in their order; defaults are not read."""
    by_position = [(argument.arg, Parameter.POSITIONAL_ONLY) for argument in arguments.posonlyargs]
    by_position += [(argument.arg, Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments.args]
    required = len(by_position) - len(arguments.defaults)
    parameters = [
        Parameter(name, kind, default=Parameter.empty if index < required else _SOME_DEFAULT)
        for index, (name, kind) in enumerate(by_position)
    ]
    parameters += [Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL)] if arguments.vararg else []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        empty = Parameter.empty if default is None else _SOME_DEFAULT
        parameters.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=empty))
    return parameters + ([Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)] if arguments.kwarg else [])
