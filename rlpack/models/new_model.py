"""A new model on the meta device, from which each rank computes only its part of the weights.

All ranks draw the same stream of random numbers, one weight at a time (`rlpack.models.initialization`), and keep their
parts. Weights therefore depend only on the seed, whatever the layout.

Invariants (tests/unit/models/test_new_model.py, tests/distributed/models/test_sharded_new_model.py):

1. weights, buffers and ties are those of the model built whole, bit for bit;
2. a rank holds its part and the weights that are drawn together: in most families, one;
3. a model that can't be built in parts raises `NotInPartsError` before any number is drawn.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlpack.models import attention
from rlpack.models.adapters import merged_name
from rlpack.models.initialization import Initialization, Place, recorded
from rlpack.models.loading import with_attention
from rlpack.models.parts import allocate, copy_part, local_part, part_offsets
from rlpack.models.stored_model import NotInPartsError


@dataclass(frozen=True)
class NewModel:
    """A model on the meta device, and how its weights are computed.

    Attributes:
        model: complete except for the values of its weights and buffers. It may get adapters before its weights.
        record: the operations that compute them.
        places: places of weights and buffers in the record, by all of their names.
        seed: random seed.
    """

    model: PreTrainedModel
    record: Initialization
    places: Mapping[str, Place]
    seed: int

    @classmethod
    def open(cls, config: PreTrainedConfig, attention_name: str, seed: int, source: str) -> "NewModel":
        """Build the model without values.

        Args:
            config: the model's config, which the model keeps and changes.
            attention_name: as for `build_causal_lm`.
            seed: random seed.
            source: where the config comes from, for errors.

        Raises:
            ModelError: the model can't use the attention.
            NotInPartsError: its code needs values while it builds.
        """
        attention.register()
        opened: list[NewModel] = []

        def build(name: str) -> PreTrainedModel:
            opened.append(cls._record(config, name, seed))
            return opened[-1].model

        with_attention(build, attention_name, source)
        return opened[-1]

    @classmethod
    def _record(cls, config: PreTrainedConfig, attention_name: str, seed: int) -> "NewModel":
        """Build the model on tensors without data."""
        with recorded() as record:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_name, dtype=torch.float32)
        tensors = dict(_named_tensors(model))
        places = {name: record.place_of(tensor) for name, tensor in tensors.items()}
        by_storage = {place.storage: id(tensors[name]) for name, place in places.items()}
        for name, place in places.items():
            if by_storage[place.storage] != id(tensors[name]):
                raise NotInPartsError(f"{name} shares its memory with another weight")
        for name, module in model.named_modules():
            if any(isinstance(value, FakeTensor) for value in _values(vars(module).items(), set())):
                raise NotInPartsError(f"{name or 'it'} keeps tensors that are neither weights nor buffers")
        _to_meta(model)
        return cls(model, record, places, seed)

    def materialize(
        self, root: nn.Module, device: torch.device | str, weights_device: torch.device | str | None = None
    ) -> None:
        """Allocate the tensors on the meta device, and compute their values; no rank communicates.

        Args:
            root: a module with some or all modules of `model`, sharded or not.
            device: device of the weights and buffers.
            weights_device: device of the weights, if it isn't that of the buffers.
        """
        allocate(root, device, weights_device)
        inside = {id(tensor) for tensor in [*root.parameters(), *root.buffers()]}
        targets: dict[Place, Tensor] = {}
        for name, tensor in _named_tensors(self.model):
            place = self.places.get(merged_name(name) or "")
            if place is not None and id(tensor) in inside:
                targets[place] = tensor
        for place, whole in self.record.values(targets, self.seed):
            _keep_part(targets[place], whole)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and buffers by all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _values(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and dictionaries of a module, except those of its own tensors."""
    for key, item in value:
        if key in ("_parameters", "_buffers", "_modules"):
            continue
        yield item
        if isinstance(item, (list, tuple, dict)) and id(item) not in seen:
            seen.add(id(item))
            yield from _values(item.items() if isinstance(item, dict) else enumerate(item), seen)


def _to_meta(model: PreTrainedModel) -> None:
    """Replace weights and buffers without data by tensors on the meta device; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(weight) not in made:
                empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                made[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
            module.register_parameter(name, made[id(weight)])  # pyright: ignore[reportArgumentType]
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            empty = made.setdefault(id(buffer), torch.empty(buffer.shape, dtype=buffer.dtype, device="meta"))
            module.register_buffer(name, empty, persistent=name not in module._non_persistent_buffers_set)


@torch.no_grad()
def _keep_part(weight: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor into a weight; only the part goes to the weight's device."""
    if (offsets := part_offsets(weight)) is None:
        copy_part(weight, whole)
        return
    part = local_part(weight)
    part.copy_(whole[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))])
