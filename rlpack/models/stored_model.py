"""A model on the meta device, and the safetensors files from which each rank reads only its part of the weights.

transformers' own loader runs first, on tensors that have names and shapes but no data. It determines missing weights,
wrong shapes, ties, and the conversions that an export reverts. This module reads only the values, after the model is
sharded, for any mesh and placements.

Invariants (tests/unit/models/test_stored_model.py, tests/distributed/models/test_sharded_loading.py):

1. weights, buffers and ties are those of `from_pretrained` in fp32, bit for bit, and the config says which are tied;
2. a rank holds its shard and up to 64 MiB of a file at a time; also one whole weight where transformers joins or
   splits tensors, or its own experts of one weight where it stacks experts;
3. a model that can't be loaded in parts raises `NotInPartsError` before any values are read.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlpack.models.adapters import merged_name
from rlpack.models.name_conversion import Conversion, conversions_of
from rlpack.models.parts import allocate, copy_part, local_part, part_offsets
from rlpack.models.stored_weights import check_report, load_on_meta, untie_config, unused_weights
from rlpack.models.weight_files import WeightFiles


class NotInPartsError(RuntimeError):
    """A model can't be loaded in parts and has to be loaded whole; the message says why."""


@dataclass(frozen=True)
class StoredModel:
    """A model on the meta device and its files.

    Attributes:
        model: complete except for its weights and persistent buffers. It may get adapters before its weights.
        shapes: an unsharded copy of it, whose config and shapes the conversions read.
        files: the files with the weights.
        conversions: how the weights are made from the files' tensors.
        tied: the names of each weight that has several.
    """

    model: PreTrainedModel
    shapes: PreTrainedModel
    files: WeightFiles
    conversions: list[Conversion]
    tied: list[list[str]]

    @classmethod
    def open(
        cls,
        kind: type[PreTrainedModel],
        config: PreTrainedConfig,
        paths: list[Path],
        *,
        source: str,
        key: str,
        **options: Any,
    ) -> "StoredModel":
        """Build the model with transformers' loader, and locate its weights in the files.

        Args:
            kind: class of the model.
            config: config of the model.
            paths: its safetensors files.
            source: path or hub name of the model, for errors.
            key: configuration key of the source, for errors.
            options: further arguments of `from_pretrained`, such as `attn_implementation`.

        Raises:
            ModelError: the files lack weights, or weights have wrong shapes.
            NotInPartsError: transformers computes weights that the files lack.
        """
        files = WeightFiles(paths)
        shapes = {name: torch.empty(shape, device="meta") for name, shape in files.shapes.items()}
        model, report = load_on_meta(kind, copy.deepcopy(config), shapes, **options)
        check_report(report, model, source, key)
        conversions = conversions_of(model, shapes)
        made = {name for item in conversions for name in item.convert(model, shapes.__getitem__)}
        _tie_equal_weights(model, files, conversions, made)
        untie_config(model, source)
        state = model.state_dict(keep_vars=True)
        loaded = {id(state[name]) for name in made if name in state}
        others = {name for name, tensor in state.items() if id(tensor) not in loaded}
        if others := sorted(others - unused_weights(model, key)):
            raise NotInPartsError(f"transformers computes the value of {others[0]}, which the files lack")
        tied = _tied_names(state)
        _rebuild_buffers(model)
        return cls(model, copy.deepcopy(model), files, conversions, tied)

    def materialize(
        self, root: nn.Module, device: torch.device | str, weights_device: torch.device | str | None = None
    ) -> None:
        """Allocate the tensors on the meta device, and read their values; no rank communicates.

        Args:
            root: a module with some or all modules of `model`, sharded or not. Weights of the others are not read; nor
                are those that `model` itself has lost as a pipeline stage.
            device: device of the weights and buffers.
            weights_device: device of the weights, if it isn't that of the buffers.
        """
        allocate(root, device, weights_device)
        inside = {id(tensor) for tensor in [*root.parameters(), *root.buffers()]}
        state = {merged_name(name): tensor for name, tensor in self.model.state_dict(keep_vars=True).items()}
        for names in self.tied:
            # The files may have the weight under the name of a module that `root` or the stage lacks.
            own = [state[name] for name in names if name in state and id(state[name]) in inside]
            state |= {name: own[0] for name in names if own and id(state.get(name)) not in inside}
        for conversion in self.conversions:
            if conversion.first in state and id(state[conversion.first]) in inside:
                self._read(conversion, state)

    def _read(self, conversion: Conversion, state: Mapping[str | None, Any]) -> None:
        """Read the weights of one conversion."""
        weight = state[conversion.first]
        offsets, part = part_offsets(weight), local_part(weight)
        if conversion.converter is None and offsets is not None:
            self.files.read_into(conversion.source, part, offsets)
            return

        def read(name: str) -> Tensor:
            return self.files.read(name, weight.dtype)

        if offsets and conversion.stacks_rows(weight.shape[0]):
            if part.numel():
                rows, *others = (slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
                part.copy_(conversion.convert(self.shapes, read, rows)[conversion.first][(slice(None), *others)])
            return
        for name, whole in conversion.convert(self.shapes, read).items():
            copy_part(state[name], whole)


def _tie_equal_weights(
    model: PreTrainedModel, files: WeightFiles, conversions: list[Conversion], made: set[str]
) -> None:
    """Tie weights that the files store twice with equal values, which transformers' loader can't see without values."""
    sources = {item.first: item.source for item in conversions if item.converter is None}
    for target, source in list(model.all_tied_weights_keys.items()):
        if not {target, source} <= made:
            continue
        if not {target, source} <= sources.keys():
            raise NotInPartsError(f"the files have both {target} and {source}, which are tied, in another form")
        if files.equal(sources[target], sources[source]):
            module, _, name = target.rpartition(".")
            setattr(model.get_submodule(module), name, model.get_parameter(source))
        else:
            model.all_tied_weights_keys.pop(target)


def _tied_names(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    return [same for same in names.values() if len(same) > 1]


def _rebuild_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that files don't have, such as rotary frequencies, on the CPU, as transformers does."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, own = name.rpartition(".")
        module = model.get_submodule(parent)
        module.register_buffer(own, torch.empty_like(buffer, device="cpu"), persistent=False)
    # initialize_weights skips tensors and modules with this mark of transformers.
    for tensor in _stored(model):
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.modules():
        module._is_hf_initialized = False  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


def _stored(model: PreTrainedModel) -> Iterator[Tensor]:
    """Yield parameters and persistent buffers, which the files have."""
    yield from model.parameters()
    computed = {id(buffer) for _, buffer in model.named_non_persistent_buffers()}
    yield from (buffer for buffer in model.buffers() if id(buffer) not in computed)
