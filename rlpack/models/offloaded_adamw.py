"""AdamW whose moments are in host memory, except during the step of their weights.

The step runs on the weights' device, one bucket of weights at a time: the bucket's moments are copied to the device,
AdamW runs as it does without offloading, and the moments are copied back. The device never holds more than the moments
of one bucket, and results are bit-identical.

The alternative, a step on the CPU, would copy gradients to the host and weights back. That is half of the bytes over
the bus, but the arithmetic is then limited by the bandwidth of the host's memory, which all GPUs of a node share.

Invariants (tests/unit/models/test_offloaded_adamw.py):

1. weights and moments are those of `torch.optim.AdamW` bit for bit;
2. moments stay in the same host memory, pinned if the weights are on a GPU, also after a checkpoint is loaded;
3. at most `bucket_bytes` of moments are on the device, or those of one weight if it is larger.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlpack.models.parts import local_part

BUCKET_BYTES = 2**28
_MOMENTS = "exp_avg", "exp_avg_sq"


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments of zero in host memory, which exist from the start."""

    def __init__(self, groups: Any, *, bucket_bytes: int = BUCKET_BYTES, **options: Any) -> None:
        """Allocate the moments.

        Args:
            groups: groups of parameters, already sharded if at all.
            bucket_bytes: maximum size of a bucket's moments.
            **options: `lr`, `betas`, `eps` and `weight_decay` of `torch.optim.AdamW`.
        """
        super().__init__(groups, foreach=True, **options)
        self._bucket_bytes = bucket_bytes
        for group in self.param_groups:
            for weight in group["params"]:
                moments = {name: _zeros_on_host(weight) for name in _MOMENTS}
                self.state[weight] = {"step": torch.zeros(()), **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the weights that have gradients; wait until their moments are back in host memory."""
        assert closure is None, "closures would need gradients of several forward passes"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for bucket in _buckets(weights, self._bucket_bytes):
                self._step_bucket(bucket, group)
        for device in {weight.device for group in self.param_groups for weight in group["params"]}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a checkpoint reads the moments next

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy moments into host memory, and set the options of the groups.

        `torch.optim.Optimizer.load_state_dict` would move all moments to the weights' device.
        """
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for name, weight in zip(names, weights, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                local_part(self.state[weight][key]).copy_(local_part(torch.as_tensor(value)))
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})

    def _step_bucket(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update some weights of a group."""
        parts = [local_part(weight) for weight in weights]
        gradients = [local_part(weight.grad) for weight in weights if weight.grad is not None]
        hosts = [[local_part(self.state[weight][name]) for weight in weights] for name in _MOMENTS]
        # A copy on the CPU, too, where tests run the same code.
        first, second = (
            [host.to(part.device, non_blocking=True, copy=True) for host, part in zip(each, parts, strict=True)]
            for each in hosts
        )
        adamw(
            parts,
            gradients,
            first,
            second,
            [],
            [self.state[weight]["step"] for weight in weights],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for each, updated in zip(hosts, (first, second), strict=True):
            for host, moment in zip(each, updated, strict=True):
                host.copy_(moment, non_blocking=True)


def _zeros_on_host(weight: Tensor) -> Tensor:
    """Return zeros in host memory with the shape and placements of a weight."""
    return torch.zeros_like(weight.detach(), device="cpu", pin_memory=weight.device.type == "cuda")


def _buckets(weights: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield runs of weights whose moments have at most `bucket_bytes`; a larger weight is a run by itself."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for weight in weights:
        size = len(_MOMENTS) * local_part(weight).nbytes
        if bucket and num_bytes + size > bucket_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(weight)
        num_bytes += size
    if bucket:
        yield bucket
