"""How transformers' loader turns the tensors of model files into the weights of its modules.

transformers renames tensors, and stacks, joins or splits those of some architectures, such as the experts of mixtures.
The rules are its own (`transformers.conversion_mapping`), applied as in `convert_and_load_state_dict_in_model`, but one
weight at a time and without keeping any.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Conversion:
    """How one weight, or several that are made together, are made from tensors of the files.

    Attributes:
        first: name of the weight, or of the first.
        converter: the operations; None if the weight is the tensor itself.
        sources: names of the tensors by the converter's patterns, in the order in which they are used.
    """

    first: str
    converter: WeightConverter | None = None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Return the name of the only tensor, where there is no converter."""
        assert self.converter is None
        return next(iter(self.sources.values()))[0]

    def convert(
        self, model: PreTrainedModel, read: Callable[[str], Tensor], rows: slice | None = None
    ) -> dict[str, Tensor]:
        """Return the weights by name.

        Args:
            model: whose config and shapes the operations read.
            read: returns a tensor of the files.
            rows: only these entries of the first axis, if `stacks_rows`.
        """
        if self.converter is None:
            return {self.first: read(self.source)}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names if rows is None else names[rows]:
                # transformers calls it when it converts, and then frees the tensor.
                converter.add_tensor(self.first, name, pattern, lambda name=name: read(name))  # pyright: ignore[reportArgumentType]
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    def stacks_rows(self, num_rows: int) -> bool:
        """Return whether entry k of the weight's first axis depends only on the k-th tensor of each pattern.

        Args:
            num_rows: size of the weight's first axis.
        """
        if self.converter is None or any(len(names) != num_rows for names in self.sources.values()):
            return False
        merge, *others = self.converter.operations
        return type(merge) is MergeModulelist and merge.dim == 0 and all(map(_keeps_rows, others))


def conversions_of(model: PreTrainedModel, names: Iterable[str]) -> list[Conversion]:
    """Return how the weights of a model are made from tensors of these names; unused tensors are left out."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    conversions: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        converter = None if pattern is None else by_pattern[pattern]
        conversion = conversions.setdefault(target, Conversion(target, converter))
        conversion.sources.setdefault(name if pattern is None else pattern, []).append(name)
    return list(conversions.values())


def _keeps_rows(operation: object) -> bool:
    """Return whether an operation leaves the first axis unchanged."""
    if type(operation) is Concatenate:
        return operation.dim > 0
    # With check_dims it compares shapes with those of the whole weight.
    return type(operation) is Transpose and not operation.check_dims and min(operation.dim0, operation.dim1) > 0
