from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.sharded import load_training_state, save_training_state
from rlpack.config.sections.optimization import Optimizer
from rlpack.gloo import GLOO
from rlpack.models.optimizers import build_optimizer


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def training(width: int = 3, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(width, 2)
    return model, build_optimizer(model, Optimizer(learning_rate=0.1, weight_decay=0.01))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    inputs = torch.arange(6, dtype=torch.float32).reshape(2, 3) * number - 3
    model(inputs).square().sum().backward()
    optimizer.step()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("saved_after", [0, 1, 3])
def test_saving_does_not_change_training_and_loading_goes_on_bit_for_bit(tmp_path: Path, saved_after: int) -> None:
    straight, saved, loaded = training(), training(), training(seed=1)
    for number in range(1, 6):
        step(*straight, number)
    for number in range(1, saved_after + 1):
        step(*saved, number)
    save_training_state(*saved, tmp_path / "state")
    load_training_state(*loaded, tmp_path / "state")
    for number in range(saved_after + 1, 6):
        step(*saved, number)
        step(*loaded, number)
    for expected, went_on, resumed in zip(*(weights(m) for m, _ in (straight, saved, loaded)), strict=True):
        assert torch.equal(expected, went_on)
        assert torch.equal(expected, resumed)


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_another_shape_is_a_typed_error(tmp_path: Path) -> None:
    save_training_state(*training(), tmp_path / "state")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_training_state(*training(width=4), tmp_path / "state")
