"""Which weights are trained, and their optimizer: for any module, the policy's or a critic's.

Invariants (tests/unit/models/test_optimizers.py):

1. a frozen weight has no gradient, no optimizer state and stays as it is, bit for bit;
2. an optimizer has its state from the start, so that saving never changes what follows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlpack.config.sections.optimization import Optimizer
from rlpack.models.errors import ModelError
from rlpack.models.patterns import chosen


def freeze(model: nn.Module, settings: Optimizer, key: str = "actor.optimizer") -> None:
    """Stop training the weights that `settings.freeze` names, and see that every pattern of `settings` names some.

    Before the model is sharded. A tied weight goes by each of its names.

    Args:
        model: whose names of weights the patterns are over.
        settings: the section.
        key: where the section lies, for errors.

    Raises:
        ModelError: a pattern matches no weight, or none is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen(settings.no_decay, named, f"{key}.no_decay")
    for name in chosen(settings.freeze, named, f"{key}.freeze"):
        named[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in named.values()):
        raise ModelError(
            f"{key}.freeze={list(settings.freeze)} freezes all {len(named)} weights, so nothing would be trained; "
            "leave some out of it"
        )


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return AdamW over the weights of `model` that are trained, its moments at zero.

    Matrices are decayed; vectors (biases, norms) and what `settings.no_decay` matches are not.

    Args:
        model: sharded already, where it is to be; its weights' names are those of the patterns.
        settings: the section; `learning_rate` is set for every step anew by `set_learning_rate`.

    Raises:
        ModelError: a pattern matches no weight.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    no_decay = {id(named[name]) for name in chosen(settings.no_decay, named, "optimizer.no_decay")}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    decayed = [weight for weight in trained if weight.ndim >= 2 and id(weight) not in no_decay]
    rest = [weight for weight in trained if weight.ndim < 2 or id(weight) in no_decay]
    groups = [
        {"params": weights, "weight_decay": decay}
        for weights, decay in ((decayed, settings.weight_decay), (rest, 0.0))
        if weights
    ]
    if settings.name == "adamw_8bit":
        return _eight_bit(groups, settings)
    # foreach: weight by weight, DTensor's dispatch takes longer than the arithmetic of small weights.
    betas = settings.beta1, settings.beta2
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, foreach=True)
    for weight in trained:
        # What AdamW itself starts from. Without it a checkpoint before the first step would make torch invent one.
        moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        optimizer.state[weight] = {"step": torch.zeros(()), **moments}
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Let the next steps have this rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's compiled step would be compiled anew for every number
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps an optimizer of `build_optimizer` has taken, those before a checkpoint included."""
    return next((int(state["step"]) for state in optimizer.state.values() if "step" in state), 0)


def _eight_bit(groups: list[dict], settings: Optimizer) -> torch.optim.Optimizer:
    """Return torchao's AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861).

    Of the libraries that have one, this is the one whose step takes the sharded weights of FSDP2. Where a rank's part
    of a weight has under 4,096 numbers, or no multiple of 256, its moments stay in 32 bits.
    """
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]  # of an extra

    class EightBitAdamW(AdamW8bit):
        """Takes its steps uncompiled on a CPU, where compiling takes minutes and a C++ compiler."""

        @torch.no_grad()
        def step(self, closure=None):
            on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
            with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
                return super().step(closure)

    weights: Iterable[nn.Parameter] = [weight for group in groups for weight in group["params"]]
    optimizer = EightBitAdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2))
    # The moments are made by a step on gradients of zero at a rate of zero, which changes no weight.
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
    set_learning_rate(optimizer, settings.learning_rate)
    return optimizer
