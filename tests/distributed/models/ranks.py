"""Functions that each rank of the sharding tests runs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlpack.models.checks import check_isolation
from rlpack.models.errors import ModelError
from rlpack.models.inputs import ModelInputs, pack_rows
from rlpack.models.parallel import clip_grad_norm, set_gradient_sync, shard_model
from rlpack.models.policy import Policy
from tests.unit.models.tiny import VOCABULARY, tiny_model, tiny_rows
from tests.whole_weights import full_state_dict, load_full_state_dict

ROWS = tiny_rows([9, 3, 13, 6, 1, 4])

# Rows of each microbatch, by rank; rank 1's last is a dummy microbatch.
MICROBATCHES = [[[0], [2, 4], [5]], [[1, 3], [0, 5], []]]


@dataclass(frozen=True)
class Step:
    """The result of one optimizer step."""

    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    logprobs: Tensor


def dummy_inputs() -> ModelInputs:
    empty = torch.zeros(0, dtype=torch.int64)
    whole = pack_rows([torch.zeros(8, dtype=torch.int64)])
    return ModelInputs(whole.input_ids, whole.position_ids, whole.packed, slots=empty, row_lengths=empty)


def new_policy(dtype: torch.dtype = torch.float64) -> Policy:
    policy = Policy(tiny_model("qwen2", dtype=dtype), chunk=7)
    policy.train()
    return policy


def optimizer_step(policy: Policy, microbatches: list[list[int]], *, max_norm: float = 1e9) -> Step:
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for index, rows in enumerate(microbatches):
        set_gradient_sync(policy, last=index == len(microbatches) - 1)
        scores = policy(pack_rows([ROWS[row] for row in rows]) if rows else dummy_inputs(), temperature=0.8)
        (scores.logprobs.sum() + 0.1 * scores.entropy.sum()).backward()
    norm = clip_grad_norm(policy, max_norm)
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, torch.distributed.tensor.DTensor) else p.grad).clone()
        for name, p in policy.model.named_parameters()
        if p.grad is not None
    }
    optimizer.step()
    with torch.no_grad():
        logprobs = policy(pack_rows(ROWS)).logprobs
    return Step(norm, gradients, full_state_dict(policy), logprobs)


def sharded_step(
    mesh: Any, rank: int, precision: str, reshard: bool, checkpoint: bool, max_norm: float, small_bytes: int = 0
) -> Step:
    policy = new_policy(torch.float64 if precision == "fp32" else torch.float32)
    if checkpoint:
        policy.checkpoint_activations()
    shard_model(policy, mesh, precision=precision, reshard_after_forward=reshard, small_bytes=small_bytes)
    return optimizer_step(policy, MICROBATCHES[rank], max_norm=max_norm)


def load_and_save(mesh: Any, rank: int) -> tuple[bool, bool, str]:
    """Load other weights after a forward; return whether they are in use, and the error of a mismatch."""
    policy, other = new_policy(), new_policy()
    shard_model(policy, mesh, small_bytes=0)
    with torch.no_grad():
        policy(pack_rows(ROWS))
        for parameter in other.parameters():
            parameter.mul_(1.5)
        state = full_state_dict(other)
        load_full_state_dict(policy, state)
        arrived = all(torch.equal(tensor, state[name]) for name, tensor in full_state_dict(policy).items())
        used = torch.allclose(policy(pack_rows(ROWS)).logprobs, other(pack_rows(ROWS)).logprobs, rtol=0, atol=1e-12)
    state["model.norm.weight"] = torch.ones(3)
    try:
        load_full_state_dict(policy, state)
    except ModelError as error:
        return arrived, used, str(error)
    return arrived, used, ""


def canary(mesh: Any, rank: int, precision: str) -> bool:
    policy = Policy(tiny_model("qwen2", dtype=torch.float32, initializer_range=0.02))
    shard_model(policy, mesh, precision=precision)
    check_isolation(policy, "cpu", VOCABULARY)
    return True
