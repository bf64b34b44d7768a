"""Check that adapters take effect wherever a model uses their layers' weights.

A fused kernel that reads `layer.weight` gets the frozen weight W without its adapter, which then has no effect. A
weight that two layers share has an adapter in each, and no single merged value. For y = (W + s·B·A)·x, the gradient of
B is s·G·Aᵀ, where G is the gradient of W. The check compares the two gradients of B, layer by layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from rlpack.models.adapters import Adapter, find_adapters, is_adapter_dropout
from rlpack.models.check_outputs import lay_out
from rlpack.models.check_rows import random_rows
from rlpack.models.errors import ModelError
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard
from rlpack.models.parts import local_part, part_offsets, whole_tensor

_LENGTHS = (7, 4)
# Allowed difference, relative to the norm of the expected gradient; norms below this part of the largest are skipped.
_TOLERANCE, _LEAST_PART = 0.02, 1e-4
# Layers that an error names.
_NAMED = 3


def check_adapters(model: PackedModel, device: torch.device | str, vocab_size: int, *, packed: bool) -> None:
    """Raise unless each adapter gets the gradient that its layer's weight implies, in training and evaluation mode.

    It takes two forward and backward passes of 11 tokens; a collective if the model is sharded. Layers without a
    gradient, such as those of experts that no token is routed to, are not checked.

    Args:
        model: the policy with adapters; its training mode is restored.
        device: the model's device.
        vocab_size: tokens are drawn below it.
        packed: whether the role packs rows instead of padding them.

    Raises:
        ModelError: an adapter has no effect (the message names the layers, and targets without them), or the model
            can't be run.
    """
    was_training = model.training
    rows = random_rows(list(_LENGTHS), vocab_size, seed=0)
    try:
        for training in (True, False):
            model.train(training)
            for name, module in model.named_modules():
                if is_adapter_dropout(name):
                    module.eval()
            with _adapter_gradients(model) as gradients, torch.enable_grad():
                model.probe(lay_out(rows, packed=packed).to(device)).square().sum().backward()
            _compare(model.model, gradients)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # architectures fail in their own ways
        raise ModelError(
            f"{type(model.model).__name__} can't be run with adapters on all layers of actor.lora.targets: "
            f"{type(error).__name__}: {error}; name other layers, such as *.q_proj, or set actor.lora.rank=0"
        ) from error
    finally:
        model.train(was_training)


def _compare(model: nn.Module, gradients: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Raise if the gradient of an adapter's B (first of a pair) differs from the expected gradient (second)."""
    least = _LEAST_PART * max((expected.norm() for _, expected in gradients.values()), default=torch.zeros(()))
    ignored = [
        layer
        for layer, (own, expected) in gradients.items()
        if expected.norm() > least and not (own - expected).norm() <= _TOLERANCE * expected.norm()
    ]
    if not ignored:
        return
    ends = {layer.rpartition(".")[2] for layer in ignored}
    others = sorted({layer.rpartition(".")[2] for layer in gradients} - ends)
    targets = "[" + ", ".join(f'"*.{end}"' for end in others) + "]"
    way_out = f"set actor.lora.targets={targets}" if others else "set actor.lora.rank=0"
    more = f" and {len(ignored) - _NAMED} more" if len(ignored) > _NAMED else ""
    raise ModelError(
        f"{type(model).__name__} uses the weights of {', '.join(ignored[:_NAMED])}{more} without calling these layers, "
        "in a fused operation or in other layers, where adapters on them (actor.lora.targets) would have no effect; "
        f"{way_out}"
    )


@contextmanager
def _adapter_gradients(model: PackedModel) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Collect the actual and the expected gradient [d_out, r] of each layer's B, and leave no gradient stored."""
    reshard(model)  # hooks on gathered weights would never be called
    weights = dict(model.model.named_parameters())
    gradients: dict[str, tuple[Tensor, Tensor]] = {}
    adapters = {name: adapter for name, adapter in find_adapters(model.model).items() if name in weights}
    trained = {name: weight.requires_grad for name, weight in weights.items()}
    downs = {name: whole_tensor(weights[adapter.down]).float() for name, adapter in adapters.items()}
    expected: dict[str, Tensor] = {}  # of a sharded layer, this rank's rows, and the summand of its columns

    def collect(name: str, adapter: Adapter, weight: Tensor) -> None:
        offsets = part_offsets(weight)
        assert weight.grad is not None
        assert offsets is not None
        # With offloaded parameters, the gradient is on its way to host memory, in the stream that this continues.
        part = local_part(weight.grad).to(downs[name].device).float()
        down = downs[name][:, offsets[1] : offsets[1] + part.shape[1]]
        own = adapter.scale * (part @ down.t())
        weight.grad = None
        expected[name] = expected[name] + own if name in expected else own

    hooks = []
    for name, adapter in adapters.items():
        weights[name].requires_grad_(True)
        hook = weights[name].register_post_accumulate_grad_hook
        hooks.append(hook(lambda weight, name=name, adapter=adapter: collect(name, adapter, weight)))
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()
        for name, adapter in adapters.items():
            if name in expected:
                gradient, part = weights[adapter.up].grad, expected[name]
                whole = _whole(part, weights[name], weights[adapter.up].shape)
                own = torch.zeros_like(whole) if gradient is None else whole_tensor(gradient).float()
                gradients[name.removesuffix(".base_layer.weight")] = own, whole
        for name, weight in weights.items():
            weight.requires_grad_(trained[name])
            if trained[name]:
                weight.grad = None


def _whole(part: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the product of a whole gradient [d_out, d_in] and Aᵀ, [d_out, r], given the product of this rank's part.

    Args:
        part: the product of this rank's rows and columns.
        weight: the weight, whose placements the gradient shares.
        shape: shape of the whole product.
    """
    if not isinstance(weight, DTensor):
        return part
    kinds = [Partial() if placement == Shard(1) else placement for placement in weight.placements]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, weight.device_mesh, kinds, run_check=False, shape=shape, stride=stride
    ).full_tensor()
