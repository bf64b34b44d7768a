"""Count the bytes of live tensors by their use.

Fake tensors (`torch._subclasses.FakeTensor`) have shapes and no memory, so the count of a model of any size takes
seconds. Storages are counted, not tensors: a view costs nothing, and a storage that FSDP resizes counts by its size.
"""

import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The use of a storage. `backward` is what the backward pass allocates: gradients once it has ended.
Use = Literal["weights", "optimizer", "activations", "output_layer", "gathered", "gradients", "backward"]

# FSDP2's operators that put the gradients of a unit into one buffer; the second is that of PyTorch 2.15.
_CHUNK_CAT = frozenset({"fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype"})


@dataclass
class Peak:
    """The most live bytes at one time.

    Attributes:
        at_peak: live bytes by use when their sum was largest.
        most: maximum live bytes of each use, possibly at different times.
        transient: the most live bytes apart from weights and this rank's sums of gradients, which `offload=parameters`
            keeps in host memory.
    """

    at_peak: Counter[Use] = field(default_factory=Counter)
    most: Counter[Use] = field(default_factory=Counter)
    transient: int = 0

    @property
    def total(self) -> int:
        """Return the most live bytes of all uses."""
        return self.at_peak.total()


def highest(peaks: Mapping[Hashable, Peak]) -> Peak:
    """Return the peak over several phases."""
    most: Counter[Use] = Counter()
    for peak in peaks.values():
        most |= peak.most
    return Peak(
        max(peaks.values(), key=lambda peak: peak.total).at_peak, most, max(peak.transient for peak in peaks.values())
    )


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations return, from their first operation until they are freed.

    Gathered weights and sums of gradients are recognized by FSDP2's own operators; all other storages get the value of
    `use` at the time of their creation.

    Attributes:
        use: use of the storages that are created next.
        now: live bytes by use.
        phases: the peak of each phase (`begin`), in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.use: Use = "weights"
        self.now: Counter[Use] = Counter()
        self._phase = Peak()
        self.phases: dict[Hashable, Peak] = {"start": self._phase}
        self._total = self._peak = 0
        self._sums: dict[int, int] = {}
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, Use]] = {}

    def __enter__(self) -> "LiveBytes":
        """Also follow FSDP2, which frees and allocates weights by resizing their storages."""
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = self._resize(storage, size)
            self._add(storage, "gathered")
            return result

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self._resize  # pyright: ignore[reportAttributeAccessIssue]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returns."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls ask for it, and creating tensors asks several times
        kwargs = kwargs or {}
        outputs = _grouped_product(*args) if func is torch.ops.aten._grouped_mm.default else func(*args, **kwargs)
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                # A DTensor itself has no memory. Operations on its part, such as FSDP2's cast of a gradient over tensor
                # parallelism, run inside this one, where this mode is off.
                part = output._local_tensor if isinstance(output, DTensor) else output
                self._add(part.untyped_storage(), None)
        for tensor, use in _of_fsdp(func, args, kwargs, outputs):
            self._add(tensor.untyped_storage(), use)
        if _is_sum_of_gradients(func, args):
            self._sums[id(args[0].untyped_storage())] = args[0].untyped_storage().nbytes()
        if self._total > self._peak:
            self._peak, self._phase.at_peak = self._total, self.now.copy()
        transient = self._total - self.now["weights"] - sum(self._sums.values())
        self._phase.transient = max(self._phase.transient, transient)
        return outputs

    @property
    def peak(self) -> Peak:
        """Return the peak over all phases."""
        return highest(self.phases)

    def begin(self, phase: Hashable) -> None:
        """Count a new phase from here on; one of the same name is continued."""
        self._phase = self.phases.setdefault(phase, Peak())
        self._peak = self._phase.total
        self._phase.most |= self.now

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """Count storages that are created inside the context towards a use."""
        before, self.use = self.use, use
        try:
            yield
        finally:
            self.use = before

    def count(self, tensor: Tensor, use: Use) -> None:
        """Count a tensor that exists."""
        self._add(tensor.untyped_storage(), use)

    def end_backward(self) -> None:
        """Count the storages that remain from the backward pass as gradients."""
        for key, (reference, size, use) in self._live.items():
            if use == "backward":
                self._live[key] = reference, size, "gradients"
        self.now["gradients"] += self.now.pop("backward", 0)

    def _add(self, storage: torch.UntypedStorage, use: Use | None) -> None:
        """Count a storage; count a known one again if its size or its use has changed."""
        key, size = id(storage), storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[1] == size and use in (None, known[2]):
                return
            self._remove(key)
            use = use or known[2]
        use = use or self.use
        self._live[key] = weakref.ref(storage, lambda _: self._remove(key)), size, use
        self.now[use] += size
        self._phase.most[use] = max(self._phase.most[use], self.now[use])
        self._total += size

    def _remove(self, key: int) -> None:
        _, size, use = self._live.pop(key)
        self._sums.pop(key, None)
        self.now[use] -= size
        self._total -= size


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor | None = None, *rest: Any) -> Tensor:
    """Return a tensor with the shape of the product of experts; torch's rule for fake tensors takes only bf16."""
    if left.ndim == 2 and right.ndim == 2:
        assert ends is not None, "groups of a shared axis have ends"
        return left.new_empty(ends.shape[0], left.shape[0], right.shape[1])
    shape = [left.shape[-2], right.shape[-1]]
    return left.new_empty([left.shape[0], *shape] if left.ndim == right.ndim == 3 else shape)


def _is_sum_of_gradients(func: Any, args: Any) -> bool:
    """Return whether FSDP2 takes a weight's gradient out of the flat sum for a unit, which it then keeps."""
    if func is not torch.ops.aten.as_strided.default or args[0].ndim != 1 or args[0].dtype != torch.float32:
        return False
    return torch._C._current_graph_task_id() != -1  # in a forward pass, it takes gathered weights out of a unit's


def _of_fsdp(func: Any, args: Any, kwargs: Any, outputs: Any) -> Iterator[tuple[Tensor, Use]]:
    """Yield the tensors of FSDP2's operators: gathered weights, and gradients before and after their sum."""
    name = func.name().partition(".")[0]
    if name == "fsdp::all_gather_copy_in":
        for tensor in outputs:
            yield tensor, "gathered"
    elif name in {"fsdp::split_with_sizes_copy", *_CHUNK_CAT}:
        out = kwargs.get("out", args[-1])
        for tensor in out if isinstance(out, list | tuple) else [out]:
            yield tensor, "gradients" if name in _CHUNK_CAT else "gathered"
    elif "reduce_scatter" in name and isinstance(args[0], Tensor) and args[0].ndim == 1:
        yield args[0], "gradients"
