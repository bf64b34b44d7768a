"""Measure the structure and the language of the source tree.

    python -m benchmarks.structure

Prints one line for each measure, with its limit, and exits with 1 if a limit is exceeded. The last measure starts Ray:
it traces a generate call (`benchmarks/generate_path.py`). `tests/unit/test_structure.py` and
`tests/distributed/test_generate_path.py` assert the same limits.
"""

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlpack", "workers", "recipes")
# Wording that readers stumble over, as regular expressions; docs and messages have plainer words for all of it.
BANNED = (
    r"anew",
    r"beside",
    r"dear(?:er|est)?",
    r"likeliest",
    r"put(?:s|ting)? (?:\w+ )?away",
    r"l(?:ies|ie|ay|ying) elsewhere",
    r"of one's own",
    r"who(?:m)?ever",
    r"for good",
    r"how-many-th",
    r"slip of the pen",
    r"whereof",
    r"(?<!there )is no (?:class|file|folder|number|option|name|key|list|finite)",
    r"can't be had",
)
_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
_TEXTS = ("rlpack", "workers", "recipes", "configs", "docs", "examples", "deploy", "docker", "benchmarks", "tests")
_TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh"}
# These name the banned words, or record the outputs of earlier versions.
_EXEMPT = {"benchmarks/structure.py", "benchmarks/RESULTS.md", "tests/golden", "tests/unit/test_structure.py"}
_RECIPE_VARIABLES = {"recipe", "recipe_name", "recipe_target"}
_SHARED_STEMS = {"__init__", "errors", "__main__"}
MAX_MEDIAN_LINES, MAX_LINES, MIN_INIT_LINES, MAX_GENERATE_PATH = 8, 60, 3, 12


class Measure(NamedTuple):
    """One measure: what was counted, its figure, its limit, and where the limit is exceeded."""

    name: str
    figure: float
    limit: float
    places: list[str]

    @property
    def is_kept(self) -> bool:
        """Whether the figure is within its limit."""
        return self.figure <= self.limit


def sources() -> list[Path]:
    """Return the Python files of the packages, relative to the root; links are not followed twice."""
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in _files(ROOT / package) if _is_python(path))


def module_name(path: Path) -> str:
    """Return the module that a source file is imported as.

    >>> module_name(Path("workers/actor.py")), module_name(Path("rlpack/batch/__init__.py"))
    ('rlpack.workers.actor', 'rlpack.batch')
    """
    parts = path.with_suffix("").parts
    inside = parts if parts[0] == "rlpack" else ("rlpack", *parts)
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def import_cycle() -> list[str]:
    """Return the modules of one import cycle between files, in order; empty if there is none."""
    names = {module_name(path): path for path in sources()}
    graph = {name: _imports(ROOT / path, names) - {name} for name, path in names.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def recipe_comparisons() -> list[str]:
    """Return the lines outside of `recipes/` that compare or match a recipe's name.

    A comparison counts if one of its sides is a recipe (`recipe`, `config.recipe.name`, `values["recipe"]`) or the name
    of a built-in recipe as a string, in a collection too; so does a `match` on either.
    """
    names = frozenset(path.stem for path in (ROOT / "recipes").glob("*.py") if path.stem != "__init__")
    return [
        place
        for path in sources()
        if path.parts[0] != "recipes"
        for place in _lines(path, (node.lineno for node in _comparisons(_tree(path)) if _tests_recipe(node, names)))
    ]


def banned_words() -> list[str]:
    """Return the places of banned wording in code, docs, configurations and tests."""
    texts = (path for folder in _TEXTS for path in _files(ROOT / folder) if path.suffix in _TEXT_SUFFIXES)
    files = sorted({path.relative_to(ROOT) for path in (*texts, *ROOT.glob("*.md"))})
    return [place for path in files if not _is_exempt(path) for place in _matches(path, _BANNED)]


def repeated_modules() -> list[str]:
    """Return the file names that more than one module has, `__init__` and `errors` aside."""
    paths = defaultdict(list)
    for path in sources():
        paths[path.stem].append(str(path))
    return [", ".join(same) for stem, same in paths.items() if len(same) > 1 and stem not in _SHARED_STEMS]


def repeated_classes() -> list[str]:
    """Return the public class names that are defined more than once."""
    places = defaultdict(list)
    for path in sources():
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.name}")
    return [", ".join(same) for same in places.values() if len(same) > 1]


def function_lengths() -> dict[str, int]:
    """Return the lines of each function's body, its docstring left out, by `file:name`."""
    lengths = {}
    for path in sources():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                lengths[f"{path}:{node.lineno} {node.name}"] = lines
    return lengths


def short_init_docs() -> list[str]:
    """Return the packages whose `__init__` says too little about what is in them."""
    docs = {path: ast.get_docstring(_tree(path)) or "" for path in sources() if path.name == "__init__.py"}
    return [
        f"{path}: {len(doc.splitlines())} lines" for path, doc in docs.items() if len(doc.splitlines()) < MIN_INIT_LINES
    ]


def measures() -> list[Measure]:
    """Return every measure of the source tree."""
    lengths = function_lengths()
    long = [f"{place}: {lines} lines" for place, lines in lengths.items() if lines > MAX_LINES]
    counted = {
        "import cycles between files": import_cycle(),
        "comparisons of the recipe's name outside recipes/": recipe_comparisons(),
        "banned words": banned_words(),
        "repeated module names": repeated_modules(),
        "repeated public classes": repeated_classes(),
        f"functions over {MAX_LINES} lines": long,
        f"package __init__ under {MIN_INIT_LINES} lines": short_init_docs(),
    }
    median = statistics.median(lengths.values())
    return [
        *(Measure(name, len(places), 0, places) for name, places in counted.items()),
        Measure("median lines of a function", median, MAX_MEDIAN_LINES, []),
    ]


def generate_measure(path: list[str]) -> Measure:
    """Return the measure of a generate call's path, as `benchmarks.generate_path` traces it."""
    return Measure("functions from the recipe to the engine", len(path), MAX_GENERATE_PATH, path)


def main() -> int:
    """Print every measure; return 1 if a limit is exceeded."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from benchmarks.generate_path import traced_path  # imports PyTorch and Ray

    results = measures()
    for result in results:
        show(result)
    results.append(generate_measure(traced_path()))
    show(results[-1])
    return int(not all(result.is_kept for result in results))


def show(result: Measure) -> None:
    """Print a measure, and the places that count if its limit is exceeded."""
    print(f"{result.name:55} {result.figure:8g}   limit {result.limit:g}{'' if result.is_kept else '   EXCEEDED'}")
    for place in [] if result.is_kept else result.places:
        print(f"    {place}")


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith((".", "__pycache__")):
            yield from _files(path)
        elif path.is_file():
            yield path


def _is_python(path: Path) -> bool:
    return path.suffix == ".py"


def _is_exempt(path: Path) -> bool:
    return any(path == Path(exempt) or Path(exempt) in path.parents for exempt in _EXEMPT)


def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _matches(path: Path, pattern: re.Pattern[str]) -> list[str]:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return _lines(path, (number for number, line in enumerate(lines, 1) if pattern.search(line)))


def _lines(path: Path, numbers: Iterable[int]) -> list[str]:
    """Return `file:number: text` of each line, numbers from 1; a line is returned once."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return [f"{path}:{number}: {lines[number - 1].strip()[:100]}" for number in sorted(set(numbers))]


def _comparisons(tree: ast.Module) -> Iterator[ast.Compare | ast.Match]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.Match))


def _tests_recipe(node: ast.Compare | ast.Match, names: frozenset[str]) -> bool:
    """Whether a comparison or a `match` tests which recipe runs."""
    if isinstance(node, ast.Match):
        patterns = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.MatchValue)]
        return bool(patterns) and any(_is_recipe(value, names) for value in (node.subject, *patterns))
    if not any(isinstance(operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for operator in node.ops):
        return False
    sides = [node.left, *node.comparators]
    elements = [element for side in sides if isinstance(side, ast.Tuple | ast.List | ast.Set) for element in side.elts]
    return any(_is_recipe(value, names) for value in (*sides, *elements))


def _is_recipe(value: ast.expr, names: frozenset[str]) -> bool:
    """Whether an expression is a recipe, a part of one, or the name of a built-in one."""
    match value:
        case ast.Constant(value=str(text)):
            return text in names
        case ast.Name(id=key):
            inner = None
        case ast.Attribute(value=inner, attr=key) | ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            pass
        case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[ast.Constant(value=key), *_]):
            pass
        case ast.Call(func=inner):
            key = None
        case _:
            return False
    return key in _RECIPE_VARIABLES or (inner is not None and _is_recipe(inner, names))


def _imports(path: Path, names: Iterable[str]) -> set[str]:
    """Return the modules among `names` that a file imports, in functions and for type checkers too."""
    known, targets = set(names), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= inner & known or {node.module}
    return targets & known


if __name__ == "__main__":
    sys.exit(main())
