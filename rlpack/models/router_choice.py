"""The routers of a mixture of experts: where they are, how they choose experts, and how to choose in their place.

Families score and choose experts in different ways, but each router calls `topk` over all experts once. A
`TorchFunctionMode` sees this call, so no family needs rules.

Letters: L layers with experts, E experts of a layer, k experts of a token, n slots of this rank.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlpack.models.errors import ModelError
from rlpack.models.expert_parallel import expert_modules

NO_EXPERTS = "it has no experts that transformers stacks in one module per layer"


class RouterShape(NamedTuple):
    """Sizes that all routers of a model have in common.

    Attributes:
        num_layers: layers with experts, of all pipeline stages.
        num_experts: experts of a layer.
        top_k: experts of a token.
    """

    num_layers: int
    num_experts: int
    top_k: int


def choice_dtype(shape: RouterShape) -> torch.dtype:
    """Return the dtype of recorded experts: the smallest that holds their indices."""
    return torch.uint8 if shape.num_experts <= 256 else torch.int16


def recorded_bytes(shape: RouterShape) -> int:
    """Return the bytes of a token's recorded experts.

    >>> recorded_bytes(RouterShape(num_layers=48, num_experts=128, top_k=8))
    384
    """
    return shape.num_layers * shape.top_k * choice_dtype(shape).itemsize


def router_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that choose experts, by name; each is next to the experts of its layer."""
    for name, _ in expert_modules(root):
        block = name.rpartition(".")[0]
        for child, module in root.get_submodule(block).named_children():
            if {"top_k", "num_experts"} <= vars(module).keys() and module._parameters.get("weight") is not None:
                yield f"{block}.{child}", module


def router_shape(root: nn.Module) -> RouterShape | None:
    """Return the sizes of a model's routers; None if it has no experts.

    Raises:
        ModelError: its experts are chosen elsewhere than in one module per layer, or layers differ in their sizes.
    """
    blocks = [name.rpartition(".")[0] for name, _ in expert_modules(root)]
    if not blocks:
        return None
    found = list(router_modules(root))
    if [name.rpartition(".")[0] for name, _ in found] != blocks:
        raise ModelError("its experts are not chosen by one router module per layer")
    sizes = {(cast(int, module.num_experts), cast(int, module.top_k)) for _, module in found}
    if len(sizes) > 1:
        raise ModelError(f"its layers have different numbers of experts or of choices: {sorted(sizes)}")
    return RouterShape(len(blocks), *sizes.pop())


def check_routers(root: nn.Module, *, scored: bool) -> None:
    """Raise unless the routers of a model choose experts in a known way.

    Args:
        root: a model on the meta device.
        scored: whether they also have to score all experts in a known way.

    Raises:
        ModelError: they don't, or the model has no experts.
    """
    if (shape := router_shape(root)) is None:
        raise ModelError(NO_EXPERTS)
    for name, router in router_modules(root):
        weight = cast(Tensor, router.weight)
        further = len(inspect.signature(router.forward).parameters) - 1  # a bias of the choice, in some families
        with RouterChoice(shape) as choice:
            outputs = router(weight.new_zeros(2, weight.shape[1]), *[weight.new_zeros(shape.num_experts)] * further)
        kind = f"{name} ({type(router).__name__})"
        if not choice.is_known(outputs):
            raise ModelError(f"{kind} doesn't choose experts in a known way")
        if scored and choice.scores is None:
            raise ModelError(f"{kind} scores only the chosen experts, or in an unknown way")


class FixedChoice(NamedTuple):
    """Experts to choose.

    Attributes:
        places: slots with a token, int64 [t]; the router chooses for the others, which are padding.
        experts: experts of these tokens, int64 [t, k].
    """

    places: Tensor
    experts: Tensor


class RouterChoice(TorchFunctionMode):
    """Observes or replaces the choice of a router, which is its one call of `topk` over all experts.

    Attributes:
        scores: scores of all experts, [n, E]: the result of the softmax or sigmoid before the choice.
        num_changed: number of tokens that would have chosen a different set of experts, int64 []; None without fixed
            experts.
    """

    def __init__(self, shape: RouterShape, fixed: FixedChoice | None = None) -> None:
        super().__init__()
        self.scores: Tensor | None = None
        self.num_changed: Tensor | None = None
        self._shape = shape
        self._fixed = fixed
        self._num_choices = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func.__name__
        if name in {"softmax", "sigmoid"} and not self._num_choices and self._is_of_experts(outputs):
            self.scores = outputs
        if name == "topk" and self._is_of_experts(args[0]) and outputs[1].shape[-1] == self._shape.top_k:
            self._num_choices += 1
            if self._fixed is not None:
                return self._fix(args[0], outputs[1], self._fixed)
        return outputs

    def _fix(self, scores: Tensor, free: Tensor, fixed: FixedChoice) -> Any:
        """Return what `topk` would, had it chosen the fixed experts.

        Args:
            scores: the scores that the choice is based on, [n, E].
            free: the router's own choice, int64 [n, k].
            fixed: the experts to choose.
        """
        own = free[fixed.places].sort(1).values
        self.num_changed = (own != fixed.experts.sort(1).values).any(1).sum()
        experts = free.index_copy(0, fixed.places, fixed.experts)
        # DeepSeek-V2 sets the scores of groups that it doesn't choose to 0; a fixed expert of theirs needs its own.
        if self.scores is not None:
            scores = torch.where(scores == 0, self.scores.to(scores.dtype), scores)
        return torch.return_types.topk((scores.gather(1, experts), experts))  # pyright: ignore[reportAttributeAccessIssue]

    def is_known(self, outputs: Any) -> bool:
        """Return whether the router chose once, and returned logits, weights and indices."""
        sizes = [output.shape[-1] for output in outputs] if isinstance(outputs, tuple) else []
        shape = self._shape
        return self._num_choices == 1 and sizes == [shape.num_experts, shape.top_k, shape.top_k]

    def _is_of_experts(self, tensor: Tensor) -> bool:
        return tensor.ndim == 2 and tensor.shape[1] == self._shape.num_experts
