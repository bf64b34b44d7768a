"""Load weights directly into a vLLM model on a CPU, by a plan recorded while vLLM loaded them itself.

vLLM's own loading creates new tensors for every layer: it walks the names of a checkpoint, copies each weight twice and
packs the result. The first update is loaded that way, while `LoadRecorder` notes which rows of which parameter each
weight fills. Later updates copy these rows in place, or pack a layer's matrix for oneDNN directly from shared memory.

Invariants (tests/vllm/test_direct_load.py):

1. a plan exists only if the path of every weight is known: views of a received weight are copied to whole rows of a
   parameter, which vLLM keeps as loaded or passes to its packing of linear layers; otherwise vLLM loads every update;
2. the rows of every parameter are covered exactly once;
3. an update is complete only if every weight of the plan arrived once, with the same shape and dtype.
"""

import bisect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from rlpack.rollout.errors import EngineError

_aten = torch.ops.aten
# Operations that a loader may apply to a parameter on the meta device, other than copying into it.
_VIEWS = frozenset(
    (_aten.detach, _aten.alias, _aten.view, _aten.slice, _aten.select, _aten.narrow, _aten.unsqueeze, _aten.squeeze)
)
_CONSTANTS = frozenset((_aten.fill_, _aten.zero_))


class NoPlanError(Exception):
    """A model's weights can't be loaded directly; the message says why."""


class View(NamedTuple):
    """A view of a received weight: offset of the first element, shape and strides, all in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Copy(NamedTuple):
    """Part of a weight that fills rows `start` to `end` (exclusive) of a parameter; `weight` is None for a constant."""

    weight: str | None
    view: View | None
    start: int
    end: int


@dataclass
class Target:
    """A parameter or buffer of a layer, as vLLM's loaders see it.

    Attributes:
        layer: the module's name.
        name: name of the parameter in the module.
        meta: the parameter before it is loaded, on the meta device; for a `bias`, which vLLM never moves there, the
            parameter itself.
        copies: the copies into it, without duplicates and in order.
    """

    layer: str
    name: str
    meta: Tensor
    copies: dict[Copy, None] = field(default_factory=dict)


def _key(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, unique while the storage exists."""
    return tensor.untyped_storage()._cdata


class LoadRecorder(TorchDispatchMode):
    """Records the copies that vLLM's loaders make during a layerwise reload."""

    def __init__(self, model: nn.Module) -> None:
        """Collect the parameters, which vLLM has just moved to the meta device."""
        super().__init__()
        self._model, self.problem = model, ""
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._targets: dict[int, Target] = {}
        for layer, module in model.named_modules():
            for name, tensor in _tensors(module).items():
                self._targets.setdefault(_key(tensor), Target(layer, name, tensor))
        self._weights: list[tuple[int, str, Tensor]] = []
        self._kept: dict[int, Tensor] = {}

    def keep(self, tensor: Tensor) -> None:
        """Register a copy of a recorded weight, which vLLM loads once all weights of its layer have arrived."""
        self._kept[_key(tensor)] = tensor

    @contextmanager
    def watch(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Record the copies that the block makes from these weights."""
        self.specs |= {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}
        self._weights = sorted((weight.data_ptr(), name, weight) for name, weight in weights.items() if weight.numel())
        with self:
            yield
        self._weights = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call that changes a parameter, then run it."""
        if not self.problem:
            try:
                self._note(func.overloadpacket, args)
            except NoPlanError as error:
                self.problem = str(error)
        return func(*args, **(kwargs or {}))

    def targets(self) -> list[Target]:
        """Return the parameters with the copies recorded so far."""
        return list(self._targets.values())

    def _note(self, packet: Any, args: Any) -> None:
        """Record an operation on a parameter that is not loaded yet, or a copy from a weight.

        Raises:
            NoPlanError: the operation can't be repeated by a plan.
        """
        tensors = [value for value in args if isinstance(value, Tensor)]
        target = self._targets.get(_key(tensors[0])) if tensors else None
        if packet is _aten.copy_:
            self._note_copy(target, *tensors[:2])
        elif target is not None and packet in _CONSTANTS:
            start, end = _rows(target, tensors[0])
            target.copies[Copy(None, None, start, end)] = None
        elif packet not in _VIEWS and any(one.is_meta and _key(one) in self._targets for one in tensors):
            raise NoPlanError(f"a loader calls {packet} on a parameter")

    def _note_copy(self, target: Target | None, to: Tensor, source: Tensor) -> None:
        """Record a copy to a parameter; copies between tensors that vLLM has just created are ignored."""
        found = self._find(source)
        if target is None:
            if found is not None and not self._is_made_for_a_layer(to):
                raise NoPlanError(f"{found[0]} is copied to a tensor that is not a parameter")
            return
        if found is None:
            if _key(to) != _key(source) and _key(source) not in self._kept:
                raise NoPlanError(f"{target.layer}.{target.name} gets values that are not part of a received weight")
            return
        if to.shape != source.shape:
            raise NoPlanError(f"{found[0]} is broadcast to {target.layer}.{target.name}")
        target.copies[Copy(*found, *_rows(target, to))] = None

    def _find(self, source: Tensor) -> tuple[str, View] | None:
        """Return the name of the weight of which a tensor is a view, and the view; None if there is none."""
        if source.is_meta or not self._weights:
            return None
        place = bisect.bisect_right(self._weights, source.data_ptr(), key=lambda weight: weight[0]) - 1
        begin, name, weight = self._weights[max(place, 0)]
        offset = source.data_ptr() - begin
        if not 0 <= offset < weight.nbytes:
            return None
        if source.dtype != weight.dtype:
            raise NoPlanError(f"{name} is read with another dtype")
        return name, View(offset // weight.itemsize, tuple(source.shape), source.stride())

    def _is_made_for_a_layer(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter that vLLM has just created, to load weights that it had kept."""
        return any(_key(tensor) == _key(one) for module in self._model.modules() for one in _tensors(module).values())


class DirectLoader:
    """Loads updates by a recorded plan."""

    def __init__(self, model: nn.Module, recorder: LoadRecorder, dtype: torch.dtype) -> None:
        """Make the plan from a complete update that vLLM has loaded and finished.

        Args:
            model: the model into which weights are loaded.
            recorder: the recorded copies of that update.
            dtype: the model's dtype, for attention layers.

        Raises:
            NoPlanError: the model can't be loaded directly.
        """
        if recorder.problem:
            raise NoPlanError(recorder.problem)
        if current_platform.is_zen_cpu():
            raise NoPlanError("zentorch may keep references to the memory that it packs from")
        modules = dict(model.named_modules())
        self._specs, self._dtype = recorder.specs, dtype
        self._attention = [module for module in modules.values() if _is_processed_by_itself(module)]
        if other := [type(module).__name__ for module in self._attention if type(module) is not Attention]:
            raise NoPlanError(f"{other[0]} computes with its weights after they are loaded")
        layers: dict[str, _Layer] = {}
        for target in recorder.targets():
            module = modules[target.layer]
            if target.copies:
                layers.setdefault(target.layer, _Layer(target.layer, module)).add(target)
            elif target.name in module._parameters:
                raise NoPlanError(f"{target.layer}.{target.name} got no weight")
        self._layers_of: dict[str, list[_Layer]] = {name: [] for name in self._specs}
        for layer in layers.values():
            for name in layer.weights():
                self._layers_of[name].append(layer)
        if unused := [name for name, users in self._layers_of.items() if not users]:
            raise NoPlanError(f"{unused[0]} is not used")
        self._layers = list(layers.values())
        self.begin()

    def begin(self) -> None:
        """Begin an update, and drop one that was not finished."""
        self._arrived: set[str] = set()
        for layer in self._layers:
            layer.arrived = {}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load a bucket.

        Raises:
            EngineError: a weight is not part of the plan, has another shape or dtype, or has already arrived.
        """
        touched: dict[int, _Layer] = {}
        for name, weight in weights.items():
            if self._specs.get(name) != (tuple(weight.shape), weight.dtype) or name in self._arrived:
                raise EngineError(f"weight {name} came twice, or is not as in the first update; begin again")
            self._arrived.add(name)
            for layer in self._layers_of[name]:
                layer.arrived[name] = weight
                touched[id(layer)] = layer
        for layer in touched.values():
            layer.load_or_keep()

    def check_complete(self) -> None:
        """Raise unless all weights have arrived.

        Raises:
            EngineError: weights are missing; names the first.
        """
        if missing := [name for name in self._specs if name not in self._arrived]:
            raise EngineError(f"{len(missing)} weights of the update are missing, the first is {missing[0]}")

    @torch.no_grad()
    def finish(self) -> None:
        """End an update."""
        for module in self._attention:
            module.process_weights_after_loading(self._dtype)  # pyright: ignore[reportCallIssue]


class _Layer:
    """A module, which is loaded once all of its weights have arrived.

    Attributes:
        arrived: the weights that have arrived, by name.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._targets: list[Target] = []
        self._packs: Any = vars(module).get("quant_method")
        if self._packs is not None and type(self._packs) not in {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}:
            raise NoPlanError(f"{name} is loaded by {type(self._packs).__name__}")
        if _is_processed_by_itself(module):
            raise NoPlanError(f"{name} processes its weights itself")
        self.arrived: dict[str, Tensor] = {}

    def add(self, target: Target) -> None:
        """Add a parameter.

        Raises:
            NoPlanError: its rows are not covered exactly once, or vLLM keeps it in another layout.
        """
        where, rows = f"{self._name}.{target.name}", 0
        copies = sorted(target.copies, key=lambda copy: copy.start)
        for copy in copies:
            if copy.start != rows:
                raise NoPlanError(f"row {rows} of {where} is not loaded exactly once")
            rows = copy.end
        if rows != _num_rows(target.meta):
            raise NoPlanError(f"row {rows} of {where} is not loaded")
        live = _tensors(self._module)[target.name]
        is_whole = live.shape == target.meta.shape and live.stride() == target.meta.stride()
        is_packed = live.numel() == 0 and type(self._packs) is UnquantizedLinearMethod and target.name == "weight"
        if not is_whole and (not is_packed or any(copy.weight is None for copy in copies)):
            raise NoPlanError(f"vLLM keeps {where} in another layout")
        if self._packs is not None and target.meta.ndim > 2:
            raise NoPlanError(f"{where} has more than two dimensions")
        self._targets.append(Target(target.layer, target.name, target.meta, dict.fromkeys(copies)))

    def weights(self) -> list[str]:
        """Return the names of the weights that the layer needs."""
        names = (copy.weight for target in self._targets for copy in target.copies)
        return list(dict.fromkeys(name for name in names if name is not None))

    def load_or_keep(self) -> None:
        """Load the layer if it is complete; else copy its weights, because their buffer is about to be overwritten."""
        if len(self.arrived) < len(self.weights()):
            self.arrived = {name: weight.clone() for name, weight in self.arrived.items()}
            return
        tensors, packed = _tensors(self._module), {}
        for target in self._targets:
            live = tensors[target.name]
            if live.shape == target.meta.shape:
                self._fill(live, target)
            else:
                packed[target.name] = live
                matrix = nn.Parameter(self._matrix(target), requires_grad=False)
                self._module.register_parameter(target.name, matrix)
        if self._packs is not None:
            self._packs.process_weights_after_loading(self._module)
        for name, live in packed.items():
            if self._module.get_parameter(name).numel():
                raise EngineError(f"vLLM did not pack {self._name}.{name}, as it did before")
            self._module.register_parameter(name, live)
        self.arrived = {}

    def _fill(self, live: Tensor, target: Target) -> None:
        """Copy the rows of a parameter in place; constant rows keep their values."""
        for copy in target.copies:
            if copy.weight is not None:
                (live[copy.start : copy.end] if live.ndim else live).copy_(self._part(copy))

    def _matrix(self, target: Target) -> Tensor:
        """Return the matrix to be packed: a view of its parts if they are contiguous in memory, else a copy."""
        parts = [self._part(copy) for copy in target.copies]
        end = parts[0].data_ptr()
        for part in parts:
            if not part.is_contiguous() or part.data_ptr() != end or part.dtype != target.meta.dtype:
                break
            end += part.nbytes
        else:
            if _key(parts[0]) == _key(parts[-1]):
                return parts[0].as_strided(target.meta.shape, target.meta.stride(), parts[0].storage_offset())
        matrix = torch.empty_strided(target.meta.shape, target.meta.stride(), dtype=target.meta.dtype)
        self._fill(matrix, target)
        return matrix

    def _part(self, copy: Copy) -> Tensor:
        """Return the source of a copy, a view of the weight."""
        assert copy.weight is not None
        assert copy.view is not None
        weight = self.arrived[copy.weight]
        return weight.as_strided(copy.view.shape, copy.view.stride, weight.storage_offset() + copy.view.offset)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself."""
    own = module._parameters | module._buffers
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _is_processed_by_itself(module: nn.Module) -> bool:
    """Return whether a module, such as attention, processes its weights after they are loaded."""
    return "process_weights_after_loading" in dir(type(module))


def _num_rows(tensor: Tensor) -> int:
    """Return the size of the first dimension, 1 for a single number."""
    return tensor.shape[0] if tensor.ndim else 1


def _rows(target: Target, view: Tensor) -> tuple[int, int]:
    """Return the first row of a parameter that a view of it covers, and the row after the last.

    Raises:
        NoPlanError: the view does not cover whole rows.
    """
    whole = target.meta
    if whole.ndim == 0 or view.numel() == whole.numel() == 0:
        return 0, _num_rows(whole)
    start, rest = divmod(int(view.storage_offset()) - int(whole.storage_offset()), whole.stride(0))
    if rest or view.shape[1:] != whole.shape[1:] or view.stride() != whole.stride() or view.ndim != whole.ndim:
        raise NoPlanError(f"a weight does not fill whole rows of {target.layer}.{target.name}")
    return start, start + view.shape[0]
