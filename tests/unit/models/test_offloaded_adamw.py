import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rlpack.checkpoint.background import BackgroundSaver
from rlpack.checkpoint.sharded import load_training_state, save_training_state
from rlpack.config.sections.compute import Offload
from rlpack.config.sections.optimization import Optimizer
from rlpack.gloo import GLOO
from rlpack.models.offloaded_adamw import OffloadedAdamW
from rlpack.models.optimizers import build_optimizer, set_learning_rate, steps_taken

SETTINGS = Optimizer(weight_decay=0.1, beta1=0.8, beta2=0.9)
# Bytes of the moments of the largest weight of `model`.
LARGEST = 2 * 4 * 64 * 32


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 32), nn.Linear(32, 3))


def train(lm: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Take a step with the gradients of each number; every third one leaves the last layer without."""
    for number in numbers:
        for name, weight in lm.named_parameters():
            generator = torch.Generator().manual_seed(1000 * number + len(name))
            weight.grad = torch.randn(weight.shape, generator=generator)
            if number % 3 == 2 and name.startswith("3."):
                weight.grad = None
        set_learning_rate(optimizer, 0.01 * (number + 1))
        optimizer.step()


def addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    return [state[name].data_ptr() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def assert_equal(left: nn.Module, one: torch.optim.Optimizer, right: nn.Module, other: torch.optim.Optimizer) -> None:
    for weight, expected in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(weight, expected)
        for key, value in other.state[expected].items():
            assert torch.equal(one.state[weight][key], value), key


@pytest.mark.parametrize("bucket_bytes", [1, LARGEST, 2**28])
def test_weights_and_moments_are_those_of_adamw_bit_for_bit(bucket_bytes: int):
    plain, offloaded = model(), model()
    expected = build_optimizer(plain, SETTINGS)
    groups = [{k: v for k, v in group.items() if k in ("weight_decay",)} for group in expected.param_groups]
    names = {id(weight): name for name, weight in plain.named_parameters()}
    for group, source in zip(groups, expected.param_groups, strict=True):
        group["params"] = [offloaded.get_parameter(names[id(weight)]) for weight in source["params"]]
    found = OffloadedAdamW(groups, bucket_bytes=bucket_bytes, lr=0.1, betas=(0.8, 0.9))
    host = addresses(found)
    train(plain, expected, range(7))
    train(offloaded, found, range(7))
    assert_equal(offloaded, found, plain, expected)
    assert addresses(found) == host
    assert steps_taken(found) == 7


class Copies(TorchDispatchMode):
    """Records the most bytes of copies that exist at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.name().startswith("aten::_to_copy") and output.ndim:
            storage = output.untyped_storage()
            self._sizes[StorageWeakRef(storage)] = storage.nbytes()
            self.most = max(self.most, sum(size for ref, size in self._sizes.items() if not ref.expired()))
        return output


@pytest.mark.parametrize("bucket_bytes", [1, LARGEST, 2**28])
def test_no_more_moments_than_those_of_a_bucket_are_copied_at_a_time(bucket_bytes: int):
    lm = model()
    optimizer = OffloadedAdamW(lm.parameters(), bucket_bytes=bucket_bytes, lr=0.1)
    every = sum(2 * weight.nbytes for weight in lm.parameters())
    with Copies() as copies:
        train(lm, optimizer, range(2))
    assert copies.most == min(max(bucket_bytes, LARGEST), every)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("before", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("after", ["none", "optimizer"])
def test_a_checkpoint_continues_bit_for_bit_with_another_offload(
    tmp_path: Path, before: Offload, after: Offload, asynchronous: bool
):
    first = model()
    one = build_optimizer(first, SETTINGS, before)
    train(first, one, range(3))
    if asynchronous:
        saver = BackgroundSaver()
        saver.start(first, one, tmp_path / "checkpoint", timeout_s=30)
        saver.wait(30)
    else:
        save_training_state(first, one, tmp_path / "checkpoint")
    expected, plain = copy.deepcopy(first), model()
    other = build_optimizer(plain, SETTINGS, after)
    host = addresses(other)
    load_training_state(plain, other, tmp_path / "checkpoint")
    assert addresses(other) == host or after == "none"
    assert_equal(plain, other, first, one)
    continued = build_optimizer(expected, SETTINGS)
    for weight, state in zip(expected.parameters(), (one.state[weight] for weight in first.parameters()), strict=True):
        continued.state[weight] = {key: value.clone() for key, value in state.items()}
    train(expected, continued, range(3, 6))
    train(plain, other, range(3, 6))
    assert_equal(plain, other, expected, continued)
