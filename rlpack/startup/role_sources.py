"""The methods of the roles that users add, read from their source files.

Importing a role imports PyTorch, which takes seconds. A class is judged here only if its methods are certain: it and
its bases are plain class statements in files that can be found without importing a package.
"""

import ast
import builtins

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import is_builtin, started_roles
from rlpack.config.schema import Config
from rlpack.distributed.errors import PlacementError
from rlpack.startup.user_sources import (
    DYNAMIC,
    Uncertain,
    absolute_module,
    count_bindings,
    imported_name,
    parse_module,
    words_of,
)

SCORING_ROLE = (
    "a custom role derives from rlpack.worker.Worker and scores rollouts with `@sharded() def score(self, shard)`; see "
    "workers/reward.py"
)
_OWN = "rlpack."
_REQUIRED = ("from_settings", "score")


def check_role_sources(config: Config) -> None:
    """Raise if a user's class of a role certainly doesn't exist, or lacks a method that every such role has.

    Raises:
        PlacementError: names the role's key and what is missing.
    """
    spec = recipe_of(config)
    for role in started_roles(config):
        target = config.roles[role].target
        if target.startswith(_OWN):
            continue
        is_scoring = not (is_builtin(role) or role in spec.own_roles)
        module, _, class_name = target.partition(":")
        try:
            methods = _methods(module, class_name)
        except Uncertain:
            continue
        except SyntaxError as error:
            raise PlacementError(
                f"roles.{role}.target is {target!r}: {module} can't be imported: SyntaxError: {error}"
            ) from error
        if methods is None:
            raise PlacementError(f"roles.{role}.target is {target!r}: {module} has no class {class_name}")
        for method in _REQUIRED if is_scoring else _REQUIRED[:1]:
            if method not in methods:
                way_out = SCORING_ROLE if is_scoring else "derive it from rlpack.worker.Worker"
                raise PlacementError(f"roles.{role}.target is {target!r}, which has no method {method}; {way_out}")


def _methods(module: str, class_name: str, seen: tuple[tuple[str, str], ...] = ()) -> set[str] | None:
    """Return all names that a class and its bases define; None if the module has no such class.

    Args:
        module: name of the module.
        class_name: name of the class.
        seen: modules and classes that led here, to detect circular imports.

    Raises:
        Uncertain: its source doesn't tell.
        SyntaxError: its source can't be parsed.
    """
    tree = parse_module(module)
    if class_name not in words_of(tree):
        return None
    if (module, class_name) in seen or count_bindings(tree, class_name) != 1:
        raise Uncertain
    seen = (*seen, (module, class_name))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (name := imported_name(node, class_name)):
            imported = _methods(absolute_module(module, node), name, seen) or _fail()
            return imported | _assigned_attributes(tree)
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            bases = (_base_methods(module, tree, base, seen) for base in node.bases)
            return _own_methods(node).union(_assigned_attributes(tree), *bases)
    raise Uncertain


def _assigned_attributes(tree: ast.Module) -> set[str]:
    """Return the attributes that a module assigns, which may be those of a class."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def _base_methods(module: str, tree: ast.Module, base: ast.expr, seen: tuple[tuple[str, str], ...]) -> set[str]:
    """Return all names that a base class defines."""
    if not isinstance(base, ast.Name):
        raise Uncertain
    if base.id not in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
        builtin = vars(builtins).get(base.id)
        if isinstance(builtin, type):
            return set(dir(builtin))
    return _methods(module, base.id, seen) or _fail()


def _own_methods(definition: ast.ClassDef) -> set[str]:
    """Return all names that a class statement assigns, in its methods too."""
    if definition.decorator_list or any(keyword.arg != "metaclass" for keyword in definition.keywords):
        raise Uncertain
    names = set(words_of(definition))
    if names & DYNAMIC or not all(_is_abc(keyword.value) for keyword in definition.keywords):
        raise Uncertain
    return names


def _is_abc(metaclass: ast.expr) -> bool:
    return isinstance(metaclass, ast.Name) and metaclass.id == "ABCMeta"


def _fail() -> set[str]:
    raise Uncertain
