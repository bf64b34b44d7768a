"""Activation checkpointing with context parallelism: which exchanges between ranks are kept, and which repeated."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from rlpack.models import context_parallel
from rlpack.models.context_parallel import RowSplit
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from tests.distributed.processes import on_ranks
from tests.unit.models.tiny import tiny_model, tiny_rows

Method = Literal["ulysses", "all_gather"]
GATHERS = [(context_parallel, "all_gather_single"), (context_parallel, "reduce_scatter_single")]
ROWS = tiny_rows([41, 3, 60, 25])
NUM_LAYERS = 2


def step(mesh: Any, kind: Literal["none", "full", "selective"], method: Method) -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of exchanges of a forward and backward pass, and the gradients."""
    policy = Policy(tiny_model("gemma3", dtype=torch.float32))
    policy.checkpoint_activations(kind)
    shard_model(policy, mesh, small_bytes=0)
    policy.split = RowSplit.of_group(mesh.get_group(), method=method)
    policy.train()
    count = 0

    def counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return exchange(*arguments, **options)

        return run

    with ExitStack() as patches:
        places = [(dist, "all_to_all_single")] if method == "ulysses" else GATHERS
        for place, name in places:
            patches.enter_context(patch.object(place, name, counted(vars(place)[name])))
        policy(pack_rows(ROWS)).logprobs.square().sum().backward()
    named = policy.named_parameters()
    return count, {name: weight.grad.full_tensor().numpy().copy() for name, weight in named if weight.grad is not None}  # pyright: ignore[reportAttributeAccessIssue]


def compared(mesh: Any, rank: int, method: Method) -> tuple[list[int], list[str]]:
    """Return the exchanges of each kind, and the weights whose gradients differ."""
    counts, expected = step(mesh, "none", method)
    others = [step(mesh, "full", method), step(mesh, "selective", method)]
    different = [name for _, found in others for name in expected if not np.array_equal(found[name], expected[name])]
    return [counts, *(count for count, _ in others)], different


def test_gradients_stay_the_same_and_only_full_checkpointing_exchanges_again(tmp_path: Path):
    # Queries, keys, values and outputs, forward and backward.
    plain = 8 * NUM_LAYERS
    for counts, different in on_ranks(tmp_path, 2, compared, "ulysses"):
        assert different == []
        assert counts == [plain, plain + 4 * NUM_LAYERS, plain]


def test_gathered_keys_are_gathered_again_rather_than_kept(tmp_path: Path):
    # Keys and values, gathered forward and scattered backward.
    plain = 4 * NUM_LAYERS
    for counts, different in on_ranks(tmp_path, 2, compared, "all_gather"):
        assert different == []
        assert counts == [plain, plain + 2 * NUM_LAYERS, plain + 2 * NUM_LAYERS]
