"""The methods of the roles that users add, read from their source files.

Importing a role imports PyTorch, which takes seconds. A class is judged here only if its methods are certain: it and
its bases are plain class statements in files that can be found without importing a package.
"""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import is_builtin, started_roles
from rlpack.config.schema import Config
from rlpack.distributed.errors import PlacementError
from rlpack.user_code import find_user_module

SCORING_ROLE = (
    "a custom role derives from rlpack.worker.Worker and scores rollouts with `@sharded() def score(self, shard)`; see "
    "workers/reward.py"
)
_OWN = "rlpack."
_REQUIRED = ("from_settings", "score")
# Names in whose presence a module or class may have more than its statements say.
_DYNAMIC = {
    *("setattr", "globals", "locals", "vars", "exec", "eval", "import_module"),
    *("__getattr__", "__init_subclass__", "__dict__", "__import__"),
}


class _Uncertain(Exception):  # noqa: N818 - no error: the importing check decides
    """What a class has can't be told from its source."""


def check_role_sources(config: Config) -> None:
    """Raise if a user's class of a role surely doesn't exist, or lacks a method that every such role has.

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
        except _Uncertain:
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
    """Return the names of a class and its bases, None if the module has no such class.

    Args:
        module: its name.
        class_name: of the class.
        seen: modules and classes that led here; an import that leads back tells nothing.

    Raises:
        _Uncertain: its source doesn't tell.
        SyntaxError: its source can't be parsed.
    """
    tree = _tree(module)
    if class_name not in _words(tree):
        return None
    if (module, class_name) in seen or _count_bindings(tree, class_name) != 1:
        raise _Uncertain
    seen = (*seen, (module, class_name))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (name := _imported_name(node, class_name)):
            imported = _methods(_absolute(module, node), name, seen) or _fail()
            return imported | _assigned_attributes(tree)
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            bases = (_base_methods(module, tree, base, seen) for base in node.bases)
            return _own_methods(node).union(_assigned_attributes(tree), *bases)
    raise _Uncertain


def _count_bindings(tree: ast.Module, name: str) -> int:
    """Return how many statements of a module bind a name, those in blocks and functions included."""
    return sum(
        (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.alias) and (node.asname or node.name).partition(".")[0] == name)
        for node in ast.walk(tree)
    )


def _assigned_attributes(tree: ast.Module) -> set[str]:
    """Return the attributes that a module assigns, which may be those of a class."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def _base_methods(module: str, tree: ast.Module, base: ast.expr, seen: tuple[tuple[str, str], ...]) -> set[str]:
    """Return the names of a base class."""
    if not isinstance(base, ast.Name):
        raise _Uncertain
    if base.id not in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
        builtin = vars(builtins).get(base.id)
        if isinstance(builtin, type):
            return set(dir(builtin))
    return _methods(module, base.id, seen) or _fail()


def _own_methods(definition: ast.ClassDef) -> set[str]:
    """Return all names that a class statement assigns, in its methods too."""
    if definition.decorator_list or any(keyword.arg != "metaclass" for keyword in definition.keywords):
        raise _Uncertain
    names = set(_words(definition))
    if names & _DYNAMIC or not all(_is_abc(keyword.value) for keyword in definition.keywords):
        raise _Uncertain
    return names


def _is_abc(metaclass: ast.expr) -> bool:
    return isinstance(metaclass, ast.Name) and metaclass.id == "ABCMeta"


def _words(tree: ast.AST) -> Iterator[str]:
    """Yield every name of definitions, variables, attributes and imports below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _imported_name(node: ast.ImportFrom, name: str) -> str | None:
    """Return what an import statement calls `name` where it comes from; None if it doesn't import it."""
    return next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """Return the module that an import statement in `module` reads."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = len(parts) - node.level + (_file_of(module).name == "__init__.py")
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])


def _tree(module: str) -> ast.Module:
    """Return the syntax tree of a module whose names are those of its statements."""
    tree = ast.parse(_file_of(module).read_bytes())
    names = set(_words(tree))
    if names & _DYNAMIC or "*" in names:
        raise _Uncertain
    return tree


def _file_of(module: str) -> Path:
    """Return a module's file, without importing the packages above it."""
    top, *rest = module.split(".")
    try:
        spec = find_user_module(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise _Uncertain
    path = Path(spec.origin)
    for name in rest:
        if path.name != "__init__.py":
            raise _Uncertain
        folder = path.parent / name
        path = folder / "__init__.py" if (folder / "__init__.py").is_file() else folder.with_suffix(".py")
    if not path.is_file():
        raise _Uncertain
    return path


def _fail() -> set[str]:
    raise _Uncertain
