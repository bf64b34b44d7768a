"""The checks of a model that no rank holds whole find the same faults."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.models.check_adapters import check_adapters
from rlpack.models.checks import check_model
from rlpack.models.errors import ModelError
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from tests.distributed.processes import on_ranks
from tests.unit.models.test_adapters import JAMBA, policy_with_adapters
from tests.unit.models.test_check_full import _MixedBackward
from tests.unit.models.tiny import VOCABULARY, tiny_model


def faults(mesh: Any, rank: int) -> tuple[str, str]:
    """Return the errors of a backward pass that mixes rows, and of an adapter without effect."""
    right, mixed = (Policy(tiny_model(dtype=torch.float32)) for _ in range(2))
    mixed.model.get_submodule("model.layers.0.mlp").register_forward_hook(
        lambda module, _, out: _MixedBackward.apply(out)
    )
    for policy in (right, mixed):
        shard_model(policy, mesh)
    check_model(right, "cpu", VOCABULARY)
    with pytest.raises(ModelError) as gradient:
        check_model(mixed, "cpu", VOCABULARY)
    adapted = policy_with_adapters("jamba", ("*_proj",), **JAMBA)
    shard_model(adapted, mesh)
    with pytest.raises(ModelError) as adapter:
        check_adapters(adapted, "cpu", VOCABULARY, packed=False)
    return str(gradient.value), str(adapter.value)


def test_sharded_models_fail_by_the_weights_that_whole_ones_fail_by(tmp_path: Path):
    first, second = on_ranks(tmp_path, 2, faults)
    assert first == second
    assert "the gradient of model." in first[0]
    assert "packed rows differs by" in first[0]
    assert "layers.0.mamba.dt_proj without" in first[1]
    assert "x_proj without" not in first[1]
