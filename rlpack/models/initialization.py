"""Record how a new model's weights get their values, and compute the values later, one tensor after another.

The model is built on tensors without data (PyTorch's fake tensors), so all of its own code runs, and every operation on
a tensor is recorded. `values` runs the same operations on real tensors, in the same order and with one stream of random
numbers. The values equal those of a model built whole, bit for bit, but a tensor has memory only between the operation
that overwrites all of it and the last one that uses it: in most families, one weight at a time.

Invariants (tests/unit/models/test_new_model.py):

1. values are those of the same build on real tensors, after the same seed;
2. random numbers that are overwritten later are still drawn, because later ones depend on that, but not kept;
3. code that reads values while it builds, or uses another random generator, fails while it is recorded.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ATEN = torch.ops.aten
# Operations after which the earlier values of their first argument don't matter.
_OVERWRITING = {
    *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.zero_.default),
    *(_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.copy_.default),
}


@dataclass(frozen=True)
class Place:
    """Where a tensor's elements are: a storage of the record, and the tensor's strides in it.

    Attributes:
        storage: number of the storage.
        dtype: dtype of the elements.
        shape: shape of the tensor.
        stride: strides in elements.
        offset: offset of the first element, in elements.
        is_whole: whether the tensor covers the storage.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool


@dataclass(frozen=True)
class _Operation:
    """An operation whose tensors are replaced by their places.

    Attributes:
        call: the operation.
        arguments: positional and keyword arguments.
        made: places of the outputs in new storages, by number among all outputs.
        overwrites: storages whose previous values don't matter afterwards, including those of `made`.
        storages: all storages that it reads or writes.
    """

    call: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    made: dict[int, Place]
    overwrites: frozenset[int]
    storages: frozenset[int]


class Initialization(TorchDispatchMode):
    """The operations that run inside `recorded`, and where the tensors of a model are in them."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # alive, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on tensors without data, and record it if it makes or changes tensors."""
        arguments = tree_map(self._place_or_value, (args, kwargs or {}))
        leaves = tree_leaves(arguments)
        if any(isinstance(value, torch.Generator) for value in leaves):
            raise ValueError("its code draws from its own random generator")
        read = {value.storage for value in leaves if isinstance(value, Place)}
        outputs = func(*args, **(kwargs or {}))
        places = {
            number: self.place_of(tensor) for number, tensor in enumerate(tree_leaves(outputs)) if _is_fake(tensor)
        }
        made = {number: place for number, place in places.items() if place.storage not in read}
        if made or func._schema.is_mutable:
            overwrites = {place.storage for place in made.values()}
            first = arguments[0][0] if arguments[0] else None
            if func in _OVERWRITING and isinstance(first, Place) and first.is_whole:
                overwrites.add(first.storage)
            storages = frozenset(read | overwrites)
            self._operations.append(_Operation(func, arguments, made, frozenset(overwrites), storages))
        return outputs

    def place_of(self, tensor: Tensor) -> Place:
        """Return the place of a tensor that was made inside `recorded`."""
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        is_whole = tensor.is_contiguous() and tensor.nbytes == storage.nbytes()
        shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return Place(number, tensor.dtype, shape, stride, offset, is_whole)

    def _place_or_value(self, value: Any) -> Any:
        """Return the place of a tensor without data, and other values as they are."""
        return self.place_of(value) if _is_fake(value) else value

    def values(self, places: Iterable[Place], seed: int) -> Iterator[tuple[Place, Tensor]]:
        """Yield the final values of tensors; the memory of each is freed before the next one.

        The process's random state does not change.

        Args:
            places: places of the tensors.
            seed: random seed.
        """
        wanted: dict[int, list[Place]] = {}
        for place in places:
            wanted.setdefault(place.storage, []).append(place)
        ends = self._ends()
        live: dict[int, torch.UntypedStorage] = {}
        state = torch.Generator().manual_seed(seed).get_state()
        for number, operation in enumerate(self._operations):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                self._run(operation, live)
                state = torch.get_rng_state()
            for storage in operation.storages:
                for place in wanted.get(storage, ()) if ends[storage][-1] == number else ():
                    yield place, _tensor(place, live[storage])
                if number in ends[storage]:
                    del live[storage]

    def _ends(self) -> dict[int, list[int]]:
        """Return for each storage the operations after which its values aren't read until they are overwritten."""
        ends: dict[int, list[int]] = {}
        for number, operation in enumerate(self._operations):
            for storage in operation.storages:
                last = ends.setdefault(storage, [])
                if last and storage not in operation.overwrites:
                    last.pop()
                last.append(number)
        return ends

    def _run(self, operation: _Operation, live: dict[int, torch.UntypedStorage]) -> None:
        """Run an operation on real tensors, and add the storages that it makes or overwrites to the live ones."""
        for storage in operation.overwrites - {place.storage for place in operation.made.values()}:
            live.setdefault(storage, torch.UntypedStorage(self._storages[storage].nbytes()))

        def real(value: Any) -> Any:
            if isinstance(value, Place):
                return _tensor(value, live[value.storage])
            return value.clone() if isinstance(value, Tensor) else value  # later operations may change constants

        args, options = tree_map(real, operation.arguments)
        outputs = tree_leaves(operation.call(*args, **options))
        live |= {place.storage: outputs[number].untyped_storage() for number, place in operation.made.items()}


@contextmanager
def recorded() -> Iterator[Initialization]:
    """Record the operations inside the context, which all run on tensors without data."""
    record = Initialization()
    with FakeTensorMode(), record:
        yield record


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def _tensor(place: Place, storage: torch.UntypedStorage) -> Tensor:
    """Return the tensor at a place."""
    return torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.shape, place.stride)
