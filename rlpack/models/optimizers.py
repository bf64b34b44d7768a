"""Freeze weights and build optimizers, for any module.

Invariants (tests/unit/models/test_optimizers.py):

1. a frozen weight has no gradient and no optimizer state, and never changes, bit for bit;
2. an optimizer has its state from the start, so saving never changes training.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlpack.config.sections.compute import Offload
from rlpack.config.sections.optimization import Optimizer
from rlpack.models.errors import nothing_trained_error
from rlpack.models.offloaded_adamw import OffloadedAdamW
from rlpack.models.patterns import match_patterns


def freeze(model: nn.Module, settings: Optimizer, key: str = "actor.optimizer") -> None:
    """Freeze the weights that `settings.freeze` matches, and check all patterns of `settings`; call before sharding.

    A tied weight matches by any of its names.

    Args:
        model: patterns refer to its weight names.
        settings: the optimizer section.
        key: configuration key of that section, for errors.

    Raises:
        ModelError: a pattern matches no weight, or no weight is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    match_patterns(settings.no_decay, named, f"{key}.no_decay")
    for name in match_patterns(settings.freeze, named, f"{key}.freeze"):
        named[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in named.values()):
        raise nothing_trained_error(key, settings.freeze)


def build_optimizer(
    model: nn.Module, settings: Optimizer, offload: Offload = "none", *, whole: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Return AdamW over the trainable weights of `model`, with moments of zero.

    Weight decay applies to matrices; vectors (biases, norms) and matches of `settings.no_decay` have none. Biases that
    are stacked, such as those of experts, are vectors, too.

    Args:
        model: already sharded, if at all; patterns refer to its weight names.
        settings: the optimizer section; `set_learning_rate` overrides its `learning_rate` at every step.
        offload: `optimizer` keeps AdamW's moments in host memory; with `parameters` the weights are there, too.
        whole: the model that `model` is a pipeline stage of, whose names patterns have to match; None for itself.

    Raises:
        ModelError: a pattern matches no weight.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    names = (whole or model).named_parameters(remove_duplicate=False)
    matching = match_patterns(settings.no_decay, (name for name, _ in names), "optimizer.no_decay")
    no_decay = {id(named[name]) for name in matching if name in named}
    no_decay |= {id(weight) for name, weight in named.items() if weight.ndim < 2 or name.endswith("bias")}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    decayed = [weight for weight in trained if id(weight) not in no_decay]
    rest = [weight for weight in trained if id(weight) in no_decay]
    groups = [
        {"params": weights, "weight_decay": decay}
        for weights, decay in ((decayed, settings.weight_decay), (rest, 0.0))
        if weights
    ] or [{"params": []}]  # a pipeline stage whose weights are all frozen
    if settings.name == "adamw_8bit":
        return _build_adamw_8bit(groups, settings)
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2)}
    if offload == "optimizer":
        return OffloadedAdamW(groups, **options)
    # foreach: for small weights, DTensor's dispatch takes longer than the arithmetic. On CPUs the fused kernel takes a
    # seventh of the time; it rounds differently.
    options["fused" if offload == "parameters" else "foreach"] = True
    optimizer = torch.optim.AdamW(groups, **options)
    for weight in trained:
        # AdamW's own initial state; without it, saving before the first step makes torch take a step to create one.
        moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        optimizer.state[weight] = {"step": torch.zeros(()), **moments}
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next steps."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a new number would recompile torchao's compiled step
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Return the steps that an optimizer of `build_optimizer` has taken, including those before a checkpoint."""
    return next((int(state["step"]) for state in optimizer.state.values() if "step" in state), 0)


def _build_adamw_8bit(groups: list[dict], settings: Optimizer) -> torch.optim.Optimizer:
    """Return torchao's AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861).

    torchao's is used because its step supports the sharded weights of FSDP2. Moments stay in 32 bits where a rank's
    part of a weight has fewer than 4,096 elements, or not a multiple of 256.
    """
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]  # an optional dependency

    class EightBitAdamW(AdamW8bit):
        """Takes uncompiled steps on the CPU, where compiling needs minutes and a C++ compiler."""

        @torch.no_grad()
        def step(self, closure=None):
            # Also if there are none, as on a pipeline stage that trains nothing.
            on_cpu = all(weight.device.type == "cpu" for group in self.param_groups for weight in group["params"])
            with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
                return super().step(closure)

    weights: Iterable[nn.Parameter] = [weight for group in groups for weight in group["params"]]
    optimizer = EightBitAdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2))
    # A step with gradients and a rate of zero creates the moments and changes no weight.
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
    set_learning_rate(optimizer, settings.learning_rate)
    return optimizer
