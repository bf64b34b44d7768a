"""What the installed transformers knows about a model type, read from its source files.

Importing its configuration classes imports PyTorch, which takes seconds. Whatever these files don't say for certain is
left to the checks that build the model: a function returns None, or treats more names as known than exist.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rlpack.models.head_dim import HEAD_DIM, reads_head_dim

# The entries of a table of names: `("qwen2", "Qwen2Config")` or `"qwen2": "Qwen2Config"`.
_ENTRY = re.compile(r'"([\w.-]+)"\s*[,:]\s*"(\w+)"')
_AUTO = ("auto_mappings.py", "configuration_auto.py")
# Calls that register a parameter or submodule under an arbitrary name.
_REGISTERS = {"setattr", "self.add_module", "self.register_module", "self.register_parameter"}
# Modules whose classes all configurations derive from.
_BASES = ("configuration_utils.py", "modeling_rope_utils.py", "generation/configuration_utils.py")


@dataclass
class ConfigSource:
    """The configuration class of a model type.

    Attributes:
        fields: the annotations of its settings by name.
        files: files that define the class and its bases from other model types.
        bases: files of the classes that all configurations derive from.
    """

    fields: dict[str, str] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)
    bases: list[Path] = field(default_factory=list)

    def may_have(self, key: str) -> bool:
        """Return whether a name may be a setting: it occurs in the model's files, or its base classes assign it."""
        if key in self.fields or any(key in _words(path) for path in self.files):
            return True
        return any(key in _assigned(path) for path in self.bases)

    def settings(self) -> set[str]:
        """Return the names of the annotated settings, including those that all models have."""
        common = _classes(self.bases[0]).get("PreTrainedConfig")
        return {*self.fields, *(name for name, _ in _annotated(common.body if common is not None else []))}


def sources() -> Path | None:
    """Return the folder of the installed transformers, None if its layout is unknown."""
    spec = importlib.util.find_spec("transformers")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    files = [*(f"models/auto/{name}" for name in _AUTO[1:]), *_BASES]
    return folder if folder is not None and all((folder / file).is_file() for file in files) else None


@cache
def model_types() -> dict[str, str]:
    """Return the names of the configuration classes by model type, in alphabetical order; {} if unknown."""
    return {kind: name for kind, name in sorted(_entries().items()) if name != "AutoConfig"}


def is_unknown_type(kind: object) -> bool:
    """Return whether transformers certainly has no such model type.

    >>> is_unknown_type("gtp"), is_unknown_type("gpt2")
    (True, False)
    """
    return bool(model_types()) and f'"{kind}"' not in _auto_text()


def config_source(kind: str) -> ConfigSource | None:
    """Return the configuration class of a model type, None if it isn't found."""
    folder, class_name = sources(), model_types().get(kind)
    if folder is None or class_name is None:
        return None
    shared = (path.relative_to(folder) for path in (folder / "integrations").rglob("config*.py"))
    source = ConfigSource(bases=[folder / base for base in (*_BASES, *shared)])
    path = _module(folder, kind)
    if not _add_class(source, path, class_name):
        return None
    if reads_head_dim(_modeling(path)):
        source.fields.setdefault(HEAD_DIM, "int")
    return source


def causal_lm_class(kind: str) -> tuple[Path, ast.ClassDef] | None:
    """Return the file and the class of a model type's causal language model, None if it isn't found."""
    folder = sources()
    if folder is None:
        return None
    name = dict(_ENTRY.findall(_causal_lm_table())).get(kind)
    path = _modeling(_module(folder, kind))
    return definition_of(path, name) if name is not None and path.is_file() else None


def is_not_causal(kind: str) -> bool:
    """Return whether transformers certainly has no causal language model for the configuration class of a type."""
    table = _causal_lm_table()
    same_class = [other for other, name in model_types().items() if name == model_types().get(kind)]
    return bool(table and same_class) and not any(f'"{other}"' in table for other in same_class)


def has_activation(name: str) -> bool | None:
    """Return whether transformers has an activation function, None if unknown."""
    folder = sources()
    text = _read(folder / "activations.py") if folder is not None else ""
    return f'"{name}"' in text if "ACT2FN" in text else None


def _causal_lm_table() -> str:
    """Return the source of the table of causal language models."""
    folder = sources()
    text = _read(folder / "models" / "auto" / "modeling_auto.py") if folder is not None else ""
    return text.partition("\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)")[0]


def definition_of(path: Path, name: str) -> tuple[Path, ast.ClassDef] | None:
    """Return a class that a file defines or imports from a file of transformers, and the file that defines it."""
    if name in _classes(path):
        return path, _classes(path)[name]
    imported = _imported_from(path, name)
    return definition_of(imported, name) if imported is not None else None


def assignments(definition: ast.ClassDef) -> Iterator[tuple[str | None, ast.expr | None]]:
    """Yield the attributes that a class's methods assign to `self`, with their values; None for an unknown name."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and node.value is not None:
                    yield target.attr, node.value
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _REGISTERS:
            yield None, None


def _module(folder: Path, kind: str) -> Path:
    """Return the file of a model type's configuration, which may not exist."""
    name = _entries("module").get(kind, kind.replace("-", "_"))
    return folder / "models" / name / f"configuration_{name}.py"


def _modeling(path: Path) -> Path:
    """Return the file of a model's code, which may not exist, from that of its configuration."""
    return path.with_name(path.name.replace("configuration_", "modeling_", 1))


@cache
def _entries(what: str = "class") -> dict[str, str]:
    """Return the configuration class, or the module where it has another name, of each model type."""
    entries = _ENTRY.findall(_auto_text())
    return {kind: name for kind, name in entries if name.endswith("Config") == (what == "class")}


@cache
def _auto_text() -> str:
    folder = sources()
    if folder is None:
        return ""
    return "\n".join(_read(folder / "models" / "auto" / name) for name in _AUTO)


def _add_class(source: ConfigSource, path: Path, class_name: str) -> bool:
    """Add a class with its bases; return whether all of them are found."""
    if not path.is_file():
        return False
    source.files.add(path)
    definition = _classes(path).get(class_name)
    if definition is None:
        return False
    for base in definition.bases:
        if not isinstance(base, ast.Name):
            return False
        if base.id in _classes(path):
            if not _add_class(source, path, base.id):
                return False
        elif base.id not in ("PreTrainedConfig", "PretrainedConfig"):
            imported = _imported_from(path, base.id)
            if imported is None or not _add_class(source, imported, base.id):
                return False
    for name, annotation in _annotated(definition.body):
        source.fields.setdefault(name, annotation)
    return True


def _imported_from(path: Path, name: str) -> Path | None:
    """Return the file that a module imports a name from by a relative import."""
    for node in _tree(path).body:
        if isinstance(node, ast.ImportFrom) and node.level and any(alias.name == name for alias in node.names):
            file = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
            return file if file.is_file() else None
    return None


def _annotated(body: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the annotated names of a class's instances and their annotations."""
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not annotation.startswith("ClassVar"):
                yield statement.target.id, annotation


@cache
def _words(path: Path) -> set[str]:
    """Return all names in a file: variables, attributes, arguments, and those in quotes."""
    words = set()
    for node in ast.walk(_tree(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                words.add(name)
            case ast.Constant(value=str(text)) if text.isidentifier():
                words.add(text)
    return words


@cache
def _assigned(path: Path) -> set[str]:
    """Return all names that a file assigns: attributes, annotated names of classes, and keys."""
    names = set()
    for node in ast.walk(_tree(path)):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Store()):
                names.add(name)
    return names


@cache
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(path).body if isinstance(node, ast.ClassDef)}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_read(path))


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
