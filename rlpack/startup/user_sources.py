"""Users' modules, parsed and not imported: what surely is in them.

Importing a module may import PyTorch, which takes seconds, or run whatever it holds.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from rlpack.user_code import find_user_module

# Names in whose presence a module or class may have more than its statements say.
DYNAMIC = {
    *("setattr", "globals", "locals", "vars", "exec", "eval", "import_module"),
    *("__getattr__", "__init_subclass__", "__dict__", "__import__"),
}


class Uncertain(Exception):  # noqa: N818 - no error: the importing check decides
    """What a module or class has can't be told from its source."""


def parse_module(module: str) -> ast.Module:
    """Return the syntax tree of a module whose names are those of its statements."""
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
    """Return what an import statement calls `name` where it comes from; None if it doesn't import it."""
    return next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)


def absolute_module(module: str, node: ast.ImportFrom) -> str:
    """Return the module that an import statement in `module` reads."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = len(parts) - node.level + (_file_of(module).name == "__init__.py")
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])
