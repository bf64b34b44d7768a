"""The rules of shape that no linter expresses; CONTRIBUTING.md says what they are for."""

import ast
from pathlib import Path

import pytest

from rlpack.config.recipes import builtin_recipes

ROOT = Path(__file__).parents[2]
PATHS = sorted(path for folder in ("rlpack", "workers", "recipes") for path in (ROOT / folder).rglob("*.py"))
MAX_FILE, MAX_RECIPE = 400, 200
# The algorithms; what they are made of (session, stages, ...) are files like any other.
RECIPES = {f"{name}.py" for name in builtin_recipes()}
DRAWERS = {"utils", "util", "common", "misc", "helpers", "manager"}


def probes(tree: ast.AST) -> list[int]:
    """Return the lines that ask an object what it has: hasattr, or getattr with a default."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    names = [(call.func.id, len(call.args), call.lineno) for call in calls if isinstance(call.func, ast.Name)]
    return [line for name, count, line in names if name == "hasattr" or (name == "getattr" and count == 3)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_keep_their_limits_and_nothing_is_probed(path):
    text = path.read_text(encoding="utf-8")
    limit = MAX_RECIPE if path.parent.name == "recipes" and path.name in RECIPES else MAX_FILE
    assert len(text.splitlines()) <= limit
    assert probes(ast.parse(text)) == []
    assert not DRAWERS & set(path.relative_to(ROOT).with_suffix("").parts)


# Files that copy an object by pickling it; what they unpickle was never outside the process.
COPIERS = {"rlpack/distributed/process.py", "rlpack/testing/local_ranks.py"}
SAFE = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
UNPICKLERS = {"pickle.load", "pickle.loads", *SAFE}


def unpickled(tree: ast.AST) -> list[str]:
    """Return the calls that run whatever a file says; a run directory may come from elsewhere."""
    calls = [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    unpickling = [(name, [ast.unparse(k) for k in call.keywords]) for name, call in calls if name in UNPICKLERS]
    return [name for name, keywords in unpickling if SAFE.get(name) not in keywords]


def test_nothing_unpickles_a_file_without_restriction():
    found = {str(path.relative_to(ROOT)) for path in PATHS if unpickled(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == COPIERS
    assert unpickled(ast.parse("torch.load(f)\ntorch.load(f, weights_only=True)\npickle.load(f)")) == [
        *("torch.load", "pickle.load")
    ]


def test_the_rules_see_what_they_forbid():
    assert {path.name for path in PATHS if path.parent.name == "recipes"} >= RECIPES
    assert probes(ast.parse("hasattr(a, 'b')\ngetattr(a, 'b')\ngetattr(a, 'b', 1)")) == [1, 3]
