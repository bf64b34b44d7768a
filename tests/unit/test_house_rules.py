"""The rules of shape that no linter expresses; CONTRIBUTING.md says what they are for."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from rlpack.config.recipes import builtin_recipes

ROOT = Path(__file__).parents[2]
PATHS = sorted(path for folder in ("rlpack", "workers", "recipes") for path in (ROOT / folder).rglob("*.py"))
MAX_FILE, MAX_RECIPE, MAX_FUNCTION = 400, 200, 60
# The algorithms; what they are made of (session, stages, ...) are files like any other.
RECIPES = {f"{name}.py" for name in builtin_recipes()}
DRAWERS = {"utils", "util", "common", "misc", "helpers", "manager"}


def too_long(tree: ast.AST) -> list[str]:
    """Return the functions whose bodies, docstrings left out, are over the limit."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            found += [node.name] if lines > MAX_FUNCTION else []
    return found


def probes(tree: ast.AST) -> list[int]:
    """Return the lines that ask an object what it has: hasattr, or getattr with a default."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    names = [(call.func.id, len(call.args), call.lineno) for call in calls if isinstance(call.func, ast.Name)]
    return [line for name, count, line in names if name == "hasattr" or (name == "getattr" and count == 3)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_keep_their_limits_and_nothing_is_probed(path):
    text = path.read_text(encoding="utf-8")
    limit = MAX_RECIPE if path.parent.name == "recipes" and path.name in RECIPES else MAX_FILE
    assert len(text.splitlines()) <= limit
    assert too_long(ast.parse(text)) == []
    assert probes(ast.parse(text)) == []
    assert not DRAWERS & set(path.relative_to(ROOT).with_suffix("").parts)


def import_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a cycle, [] if there are none."""
    remaining = dict(imports)
    while free := [module for module, imported in remaining.items() if not imported & set(remaining)]:
        for module in free:
            del remaining[module]
    if not remaining:
        return []
    # Every remaining module imports another one, so following imports comes back to a module.
    path = [next(iter(remaining))]
    while (following := min(remaining[path[-1]] & set(remaining))) not in path:
        path.append(following)
    return path[path.index(following) :]


def imports_of_files() -> dict[str, set[str]]:
    """Return the modules of the project that each of its modules imports, those for type checkers included."""
    module_of = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS}
    module_of = {
        path: (name if name.startswith("rlpack.") else f"rlpack.{name}").removesuffix(".__init__")
        for path, name in module_of.items()
    }
    known = set(module_of.values())
    imports: dict[str, set[str]] = {}
    for path, module in module_of.items():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in known else node.module for name in inner}
        imports[module] = (names & known) - {module}
    return imports


def test_no_two_modules_and_no_two_public_classes_share_a_name():
    stems = [path.stem for path in PATHS if path.stem not in {"__init__", "__main__", "errors"}]
    bodies = [ast.parse(path.read_text(encoding="utf-8")).body for path in PATHS]
    classes = [node.name for body in bodies for node in body if isinstance(node, ast.ClassDef)]
    public = [name for name in classes if not name.startswith("_")]
    assert [name for names in (stems, public) for name, count in Counter(names).items() if count > 1] == []


def test_no_files_import_each_other_in_a_cycle():
    imports = imports_of_files()
    assert {"rlpack.batch.ragged", "rlpack.batch.remote"} <= imports["rlpack.batch.columns"]
    assert import_cycle(imports) == []
    assert sorted(import_cycle({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()})) == ["b", "c"]


def test_the_rules_see_what_they_forbid():
    body = "\n".join(f"    x = {number}" for number in range(61))
    assert {path.name for path in PATHS if path.parent.name == "recipes"} >= RECIPES
    assert too_long(ast.parse(f'def f():\n    """Say."""\n{body}')) == ["f"]
    assert too_long(ast.parse(f"def f():\n{body[: body.rindex(chr(10))]}")) == []
    assert probes(ast.parse("hasattr(a, 'b')\ngetattr(a, 'b')\ngetattr(a, 'b', 1)")) == [1, 3]
