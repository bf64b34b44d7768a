"""A model whose layers run on parts of their weights, on a GPU with a group of one rank, against the whole model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlpack.gloo import GLOO
from rlpack.models.context_parallel import RowSplit
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from rlpack.models.tensor_parallel import split_weights
from rlpack.models.weight_split import WeightSplit
from tests.unit.models.tiny import tiny_model, tiny_rows
from tests.whole_weights import full_state_dict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = tiny_rows([30, 1, 47, 22])


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    store = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group(f"cpu:{GLOO},cuda:nccl", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_log_probs_and_gradients_are_those_of_the_whole_model(kind: str, sequence_parallel: bool):
    truth = Policy(tiny_model(kind, dtype=torch.float32))
    expected = truth(pack_rows(ROWS))
    expected.logprobs.sum().backward()
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp_shard", "tp"))
    policy = Policy(tiny_model(kind, dtype=torch.float32).to("cuda"))
    policy.weight_split = WeightSplit(mesh["tp"], sequence_parallel=sequence_parallel)
    split_weights(policy, policy.weight_split)
    policy.split = RowSplit.of_group(None)
    shard_model(policy, mesh["dp_shard"], small_bytes=0)
    found = policy(pack_rows(ROWS).to("cuda"))
    found.logprobs.sum().backward()
    assert (found.logprobs.cpu() - expected.logprobs).abs().max() < 1e-4
    assert full_state_dict(policy).keys() == full_state_dict(truth).keys()
    gradients = {name: weight.grad for name, weight in policy.named_parameters()}
    for name, weight in truth.named_parameters():
        assert weight.grad is not None
        gradient = gradients[name].full_tensor().cpu()  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
        assert (gradient - weight.grad).norm() <= 1e-3 * weight.grad.norm(), name
