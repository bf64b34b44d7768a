"""Parse users' modules without importing them.

Importing a module may import PyTorch, which takes seconds, and runs its code.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from rlpack.user_code import find_user_module

# Names by which a module or class may define more than its statements show, or change a function's parameters.
DYNAMIC = {
    *("setattr", "globals", "locals", "vars", "exec", "eval", "import_module"),
    *("__getattr__", "__init_subclass__", "__dict__", "__import__"),
    *("__signature__", "__wrapped__", "update_wrapper"),
}


class Uncertain(Exception):  # noqa: N818 - no error: the importing check decides
    """The source doesn't tell what a module or class contains."""


def parse_module(module: str) -> ast.Module:
    """Return the syntax tree of a module without dynamic definitions.

    Raises:
        Uncertain: the module can't be found, or may define further names.
        SyntaxError: its source can't be parsed.
    """
    tree = ast.parse(_file_of(module).read_bytes())
    names = set(words_of(tree))
    if names & DYNAMIC or "*" in names:
        raise Uncertain
    return tree


def _file_of(module: str) -> Path:
    """Return a module's file, without importing the packages above it."""
    top, *rest = module.split(".")
    try:
        spec = find_user_module(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise Uncertain
    path = Path(spec.origin)
    for name in rest:
        if path.name != "__init__.py":
            raise Uncertain
        folder = path.parent / name
        path = folder / "__init__.py" if (folder / "__init__.py").is_file() else folder.with_suffix(".py")
    if not path.is_file():
        raise Uncertain
    return path


def count_bindings(tree: ast.Module, name: str) -> int:
    """Return how many statements of a module bind a name, those in blocks and functions included."""
    return sum(
        (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.alias) and (node.asname or node.name).partition(".")[0] == name)
        for node in ast.walk(tree)
    )


def words_of(tree: ast.AST) -> Iterator[str]:
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


def imported_name(node: ast.ImportFrom, name: str) -> str | None:
    """Return the original name of `name` in an import statement; None if the statement doesn't import it."""
    return next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)


def absolute_module(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module from which an import statement in `module` imports."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = len(parts) - node.level + (_file_of(module).name == "__init__.py")
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])
