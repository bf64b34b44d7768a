"""The names that the weights of a model may have, read from the source of its classes.

A pattern that no name can match is refused before PyTorch is imported. Names are found by following the modules that a
class assigns to `self`. A module that can't be followed is open: any name with its prefix may exist. Names may be
listed that a model doesn't have, such as that of a bias that a setting turns off; the checks that build the model are
exact.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpack.startup.transformers_sources import assignments, causal_lm_class, definition_of

# Modules of PyTorch and transformers, and the names of their weights.
_LEAVES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("nn.Linear", "nn.Conv1d", "nn.LayerNorm", "Conv1D", "nn.GroupNorm"), ("weight", "bias")),
    **dict.fromkeys(("nn.Embedding", "nn.RMSNorm"), ("weight",)),
    **dict.fromkeys(
        ("nn.Dropout", "nn.Identity", "nn.SiLU", "nn.GELU", "nn.ReLU", "nn.Sigmoid", "nn.Softplus", "nn.Tanh"), ()
    ),
}
# Classes above a model's own, which have no weights.
_WITHOUT_WEIGHTS = {
    *("nn.Module", "PreTrainedModel", "GenerationMixin", "GradientCheckpointingLayer", "ABC", "ModelOutput"),
    *("EmbeddingAccessMixin", "PushToHubMixin", "object"),
}
# The activations that have weights.
_WITH_WEIGHTS = {"xielu", "prelu"}
# Other names of the number of layers in configurations.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Calls of these give numbers, texts or tensors that are no weights.
_NO_MODULE = re.compile(
    r"(torch|math|config|copy|logger|self\.config)\.\w+(\.\w+)*|nn\.(Buffer|Parameter)|int|float|bool|len|str|max|min|"
    r"getattr|hasattr|range|list|tuple|dict|set|isinstance|deepcopy|super|partial|nn\.init\.\w+"
)
_DEPTH = 12


@dataclass
class WeightNames:
    """The names that the weights of a model may have.

    Attributes:
        names: maps each known name to whether it is the weight of a linear layer.
        open: prefixes of names that can't be followed further.
    """

    names: dict[str, bool] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)

    def is_open_to(self, pattern: str) -> bool:
        """Return whether a shell-style pattern may match a name that can't be followed."""
        plain = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        return any(plain.startswith(start) or start.startswith(plain) for start in self.open)


def weight_names(kind: str, settings: Mapping[str, Any]) -> WeightNames | None:
    """Return the possible names of the weights of a causal language model.

    Args:
        kind: the model type.
        settings: settings of the model, read for the number of layers.

    Returns:
        None if the class isn't found.
    """
    found = causal_lm_class(kind)
    if found is None:
        return None
    names = WeightNames()
    _Walk(names, settings).add_class(*found, "", 0)
    return names


class _Walk:
    """Follows the submodules of a class."""

    def __init__(self, names: WeightNames, settings: Mapping[str, Any]) -> None:
        self._names = names
        self._settings = settings

    def add_class(self, path: Path, definition: ast.ClassDef, prefix: str, depth: int) -> None:
        """Add the weights of a module's class, whose names begin with `prefix`."""
        if depth > _DEPTH or any(
            isinstance(node, ast.FunctionDef) and node.name == "__new__" for node in definition.body
        ):
            self._names.open.add(prefix)
            return
        for base in definition.bases:
            name = _name(base)
            if name in _LEAVES:
                self._add_leaf(name, None, prefix)
            elif name not in _WITHOUT_WEIGHTS:
                self._follow(path, name, prefix, depth)
        for attribute, value in assignments(definition):
            if attribute is None or value is None:
                self._names.open.add(prefix)
            else:
                self._add_value(path, value, f"{prefix}{attribute}", depth)

    def _follow(self, path: Path, name: str, prefix: str, depth: int) -> None:
        """Add a class by its name in a file."""
        found = definition_of(path, name)
        if found is None:
            self._names.open.add(prefix)
        else:
            self.add_class(*found, prefix, depth + 1)

    def _add_value(self, path: Path, value: ast.expr, name: str, depth: int) -> None:
        """Add the weights of what is assigned to an attribute."""
        if isinstance(value, ast.IfExp):
            self._add_value(path, value.body, name, depth)
            self._add_value(path, value.orelse, name, depth)
        elif isinstance(value, ast.Call):
            self._add_call(path, value, name, depth)
        elif isinstance(value, ast.Subscript) and ast.unparse(value.value).startswith("ACT2FN"):
            if _WITH_WEIGHTS.intersection(map(str, self._settings.values())):
                self._names.open.add(f"{name}.")
        elif isinstance(value, ast.Subscript) and ast.unparse(value.value).isupper():
            self._names.open.add(f"{name}.")  # a class from a table

    def _add_call(self, path: Path, call: ast.Call, name: str, depth: int) -> None:
        function = _name(call.func)
        if function == "nn.Parameter":
            self._names.names.setdefault(name, False)
        elif function in _LEAVES:
            self._add_leaf(function, call, f"{name}.")
        elif function == "nn.ModuleList":
            self._add_list(path, call, name, depth)
        elif isinstance(call.func, ast.Name) and definition_of(path, function) is not None:
            self._follow(path, function, f"{name}.", depth)
        elif not _NO_MODULE.fullmatch(function):
            self._names.open.add(name)

    def _add_leaf(self, function: str, call: ast.Call | None, prefix: str) -> None:
        keywords = {} if call is None else {keyword.arg: keyword.value for keyword in call.keywords}
        bias = keywords.get("bias")
        for weight in _LEAVES[function]:
            name = f"{prefix}{weight}"
            if weight != "bias" or not (isinstance(bias, ast.Constant) and bias.value is False):
                is_linear = function == "nn.Linear" and weight == "weight"
                self._names.names[name] = is_linear or self._names.names.get(name, False)

    def _add_list(self, path: Path, call: ast.Call, name: str, depth: int) -> None:
        """Add the modules of a list, if its length is known."""
        match call.args:
            case [ast.ListComp(elt=ast.Call() as element, generators=[ast.comprehension(iter=loop, ifs=[])])]:
                length = self._length(loop)
                for index in range(length or 0):
                    self._add_call(path, element, f"{name}.{index}", depth)
            case _:
                length = None
        if length is None:
            self._names.open.add(f"{name}.")

    def _length(self, loop: ast.expr) -> int | None:
        """Return the number of layers that a loop creates; None if it isn't the model's number of layers."""
        text = re.fullmatch(r"range\((?:self\.)?config\.(\w+)\)", ast.unparse(loop))
        keys = _LAYERS if text is not None and text[1] in _LAYERS else ()
        length = next((self._settings[key] for key in keys if key in self._settings), None)
        return length if isinstance(length, int) else None


def _name(function: ast.expr) -> str:
    """Return a function or class as written, with `nn` for `torch.nn`."""
    text = ast.unparse(function)
    return text.removeprefix("torch.") if text.startswith("torch.nn.") else text
