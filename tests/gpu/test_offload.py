"""Parameters and optimizer state in host memory on a GPU, against the same steps without offloading."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlpack.checkpoint.background import BackgroundSaver
from rlpack.checkpoint.sharded import load_training_state, save_training_state
from rlpack.config.sections.compute import Checkpointing, Offload
from rlpack.config.sections.optimization import Optimizer
from rlpack.gloo import GLOO
from rlpack.models.inputs import pack_rows
from rlpack.models.optimizers import build_optimizer
from rlpack.models.parallel import clip_grad_norm, reshard, shard_model
from rlpack.models.parts import local_part
from rlpack.models.policy import Policy
from tests.unit.models.tiny import tiny_model, tiny_rows
from tests.whole_weights import full_state_dict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = tiny_rows([30, 1, 47, 22])
SETTINGS = Optimizer(learning_rate=0.01)


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    store = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group(f"cpu:{GLOO},cuda:nccl", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def training(offload: Offload, *, seed: int = 7) -> tuple[Policy, torch.optim.Optimizer]:
    policy = Policy(tiny_model("llama", dtype=torch.float32, seed=seed, hidden_size=256).to("cuda"))
    shard_model(policy, init_device_mesh("cuda", (1,)), offload=offload, small_bytes=0)
    return policy, build_optimizer(policy.pattern_root, SETTINGS, offload)


def step(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    policy.train()
    policy(pack_rows(ROWS).to("cuda")).logprobs.sum().backward()
    clip_grad_norm(policy, 0.1)
    optimizer.step()


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_steps_are_those_without_offloading_and_tensors_are_where_they_belong(offload: Offload):
    plain, offloaded = training("none"), training(offload)
    for _ in range(3):
        step(*plain)
        step(*offloaded)
    policy, optimizer = offloaded
    reshard(policy)
    place = "cpu" if offload == "parameters" else "cuda"
    assert {weight.device.type for weight in policy.parameters()} == {place}
    assert {weight.grad.device.type for weight in policy.parameters() if weight.grad is not None} == {place}
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.device.type for moment in moments} == {"cpu"}
    if offload == "optimizer":
        assert all(local_part(moment).is_pinned() for moment in moments)
    expected = full_state_dict(plain[0])
    for name, weight in full_state_dict(policy).items():
        if offload == "optimizer":
            assert torch.equal(weight, expected[name]), name
        else:  # another kernel; AdamW turns the rounding of tiny gradients into whole steps
            assert (weight - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


@pytest.mark.parametrize("before", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("after", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_loads_with_any_other_offload(tmp_path: Path, before: Offload, after: Offload, asynchronous: bool):
    saved = training(before)
    step(*saved)
    if asynchronous:
        saver = BackgroundSaver()
        saver.start(*saved, tmp_path / "state", timeout_s=30)
        saver.wait(30)
    else:
        save_training_state(*saved, tmp_path / "state")
    loaded = training(after, seed=8)
    places = {state["exp_avg"].device for state in loaded[1].state.values()}
    load_training_state(*loaded, tmp_path / "state")
    assert {state["exp_avg"].device for state in loaded[1].state.values()} == places
    expected = full_state_dict(saved[0])
    assert all(torch.equal(weight, expected[name]) for name, weight in full_state_dict(loaded[0]).items())
    step(*saved)
    step(*loaded)
    expected = full_state_dict(saved[0])
    for name, weight in full_state_dict(loaded[0]).items():
        assert (weight - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


def test_offloading_frees_memory_of_the_gpu():
    used: dict[Offload, int] = {}
    kinds: tuple[Offload, ...] = ("none", "optimizer", "parameters")
    for kind in kinds:
        policy, optimizer = training(kind)
        step(policy, optimizer)
        optimizer.zero_grad(set_to_none=True)
        reshard(policy)
        used[kind] = torch.cuda.memory_allocated()
        weights = sum(weight.nbytes for weight in policy.parameters())
        del policy, optimizer
        gc.collect()  # FSDP's units refer to each other
    assert used["none"] - used["optimizer"] > 1.9 * weights
    assert used["none"] - used["parameters"] > 2.9 * weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_checkpointing_changes_no_gradient_on_a_gpu(dtype: torch.dtype):
    def gradients(kind: Checkpointing) -> list[torch.Tensor]:
        policy = Policy(tiny_model("llama", dtype=dtype, hidden_size=256).to("cuda"))
        policy.checkpoint_activations(kind)
        policy.train()
        policy(pack_rows(ROWS).to("cuda")).logprobs.sum().backward()
        return [weight.grad for weight in policy.parameters() if weight.grad is not None]

    for found, expected in zip(gradients("selective"), gradients("none"), strict=True):
        assert (found.float() - expected.float()).norm() <= 1e-3 * expected.float().norm()
