"""Selective activation checkpointing with context parallelism: exchanges between ranks are kept, not repeated."""

from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from rlpack.models.context_parallel import RowSplit
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from tests.distributed.processes import on_ranks
from tests.unit.models.tiny import tiny_model, tiny_rows

ROWS = tiny_rows([41, 3, 60, 25])
NUM_LAYERS = 2


def step(mesh: Any, kind: Literal["none", "full", "selective"]) -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of exchanges of a forward and backward pass, and the gradients."""
    policy = Policy(tiny_model("gemma3", dtype=torch.float32))
    policy.checkpoint_activations(kind)
    shard_model(policy, mesh, small_bytes=0)
    policy.split = RowSplit.of_group(mesh.get_group())
    policy.train()
    exchange, count = dist.all_to_all_single, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return exchange(*arguments, **options)

    with patch.object(dist, "all_to_all_single", counted):
        policy(pack_rows(ROWS)).logprobs.square().sum().backward()
    named = policy.named_parameters()
    return count, {name: weight.grad.full_tensor().numpy().copy() for name, weight in named if weight.grad is not None}  # pyright: ignore[reportAttributeAccessIssue]


def compared(mesh: Any, rank: int) -> tuple[list[int], list[str]]:
    """Return the exchanges of each kind, and the weights whose gradients differ."""
    counts, expected = step(mesh, "none")
    others = [step(mesh, "full"), step(mesh, "selective")]
    different = [name for _, found in others for name in expected if not np.array_equal(found[name], expected[name])]
    return [counts, *(count for count, _ in others)], different


def test_gradients_stay_the_same_and_only_full_checkpointing_exchanges_again(tmp_path: Path):
    # Queries, keys, values and outputs, forward and backward.
    plain = 8 * NUM_LAYERS
    for counts, different in on_ranks(tmp_path, 2, compared):
        assert different == []
        assert counts == [plain, plain + 4 * NUM_LAYERS, plain]
