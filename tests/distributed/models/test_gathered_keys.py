"""Context parallelism by gathered keys, for a model whose heads the ranks don't divide."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from rlpack.models.context_parallel import RowSplit
from rlpack.models.errors import ModelError
from rlpack.models.inputs import ModelInputs, equal_rows, pack_rows
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from tests.distributed.processes import on_ranks
from tests.unit.models.tiny import tiny_model, tiny_rows

# Longer than a window, than a block of queries, and shorter than the number of chunks.
ROWS = tiny_rows([700, 3, 61, 1])
WIDE = tiny_rows([40, 40, 40])


def batches() -> list[ModelInputs]:
    return [pack_rows(ROWS), equal_rows(torch.stack(WIDE))]


def three_heads(dtype: torch.dtype) -> Policy:
    changes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    return Policy(tiny_model("gemma3", dtype=torch.float32, **changes).to(dtype))


def loss_of(policy: Policy, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
    """Return the log-probs, and a sum over log-probs and entropies in which each token has its own weight."""
    scores = policy(inputs)
    weights = torch.linspace(-1, 1, inputs.num_tokens, dtype=scores.logprobs.dtype)
    return scores.logprobs, (scores.logprobs * weights).sum() + (scores.entropy * weights.flip(0)).sum()


def scores_and_gradients(mesh: Any, rank: int, method: Literal["ulysses", "all_gather"]) -> Any:
    policy = three_heads(torch.float32)
    shard_model(policy, mesh, small_bytes=0)
    policy.split = RowSplit.of_group(mesh.get_group(), method=method)
    found = []
    for inputs in batches():
        try:
            logprobs, loss = loss_of(policy, inputs)
        except ModelError as error:
            return str(error)
        found.append(logprobs.detach().numpy().copy())
        loss.backward()
    gradients = {name: weight.grad.full_tensor().numpy().copy() for name, weight in policy.named_parameters()}  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
    return found, gradients


@pytest.mark.parametrize("size", [2, 4])
def test_scores_and_gradients_are_those_of_one_rank(size: int, tmp_path: Path):
    truth, expected = three_heads(torch.float64), []
    for inputs in batches():
        logprobs, loss = loss_of(truth, inputs)
        expected.append(logprobs.detach().numpy())
        loss.backward()
    for scores, gradients in on_ranks(tmp_path, size, scores_and_gradients, "all_gather"):
        for found, right in zip(scores, expected, strict=True):
            assert np.abs(found - right).max() <= 1e-5 * max(1.0, float(np.abs(right).max()))
        for name, weight in truth.named_parameters():
            assert weight.grad is not None
            gap = torch.from_numpy(gradients[name]).double() - weight.grad
            assert gap.norm() <= 1e-4 * weight.grad.norm(), name


def test_ulysses_refuses_the_model_and_names_the_way_out(tmp_path: Path):
    for message in on_ranks(tmp_path, 2, scores_and_gradients, "ulysses"):
        assert "3 query heads, which is not divisible by the 2 ranks" in message
        assert "or *.parallel.cp_method=all_gather" in message
