"""On every layout, the balance loss is that of each row alone, and replayed routing follows each token."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from tests.distributed.layouts import routing_ranks
from tests.distributed.layouts.cases import LAYOUTS, RUNS_ALL, batch_of, modes_of
from tests.distributed.processes import on_ranks

# Layouts, families and ways to recompute activations, for the balance loss and for replayed routing.
BALANCED = [
    ("tp2sp", "qwen3_moe", "full"),
    ("cp2ep2", "deepseek_v3", "full"),
    ("pp2cp2", "mixtral", "selective"),
]
REPLAYED = [
    ("tp2sp", "qwen3_moe", "full"),
    ("dp2ep2", "mixtral", "selective"),
    ("pp2cp2", "mixtral", "selective"),
]
# `make test-layouts` runs all of them for both, and more.
if RUNS_ALL:
    BALANCED = REPLAYED = [
        *dict.fromkeys(BALANCED + REPLAYED),
        ("one", "deepseek_v3", "selective"),
        ("dp2", "deepseek_v3", "full"),
        ("cp2", "mixtral", "full"),
        ("ep2tp2", "qwen3_moe", "none"),
        ("dp2", "qwen3_moe", "none"),
        ("dp2gather2", "qwen3_moe", "selective"),
        ("tp2", "mixtral", "none"),
        ("tp2sp", "deepseek_v3", "selective"),
        ("pp2", "qwen3_moe", "full"),
        ("pp2vpp2", "qwen3_moe_deep", "full"),
        ("pp2vpp2cp2", "mixtral_deep", "selective"),
    ]


def batch() -> BatchedDataDict:
    return batch_of("qwen3_moe").keep(["input_ids", "response_mask", "valid"])


@pytest.mark.parametrize(("layout", "family", "checkpointing"), BALANCED)
def test_balance_loss_and_its_gradients_are_those_of_each_row_alone(
    layout: str, family: str, checkpointing: str, tmp_path: Path
):
    config = routing_ranks.moe_config(family, layout, checkpointing, balance_coefficient=3.0)
    cases = [(mode, config) for mode in modes_of(layout)]
    found = on_ranks(tmp_path, LAYOUTS[layout][0], routing_ranks.supervised_steps, layout, batch(), cases)[0]
    truth, expected = routing_ranks.supervised_truth(config, batch())
    for metrics, gradients in found:
        assert {name: metrics[name] for name in truth} == pytest.approx(truth, rel=1e-5)
        assert truth["actor/moe_balance_loss"] > 1.02
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            gap = torch.from_numpy(gradients[name]).double() - gradient
            assert gap.norm() <= 1e-4 * gradient.norm(), name


def test_without_a_coefficient_the_balance_is_measured_and_has_no_gradient(tmp_path: Path):
    configs = [routing_ranks.moe_config("mixtral", "dp2", balance_coefficient=value) for value in (0.0, 3.0)]
    cases = [("packed", config) for config in configs]
    found = on_ranks(tmp_path, 2, routing_ranks.supervised_steps, "dp2", batch(), cases)[0]
    truth, expected = routing_ranks.supervised_truth(configs[0], batch())
    (metrics, gradients), (other, _) = found
    assert {name: metrics[name] for name in truth} == pytest.approx(truth, rel=1e-5)
    assert other["actor/moe_balance_loss"] == pytest.approx(truth["actor/moe_balance_loss"], rel=1e-5)
    for name, gradient in expected.items():
        gap = torch.from_numpy(gradients[name]).double() - gradient
        assert gap.norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize(("layout", "family", "checkpointing"), REPLAYED)
def test_replayed_routing_follows_each_token(layout: str, family: str, checkpointing: str, tmp_path: Path):
    config = routing_ranks.moe_config(family, layout, checkpointing, replay_routing=True)
    rows = routing_ranks.scored_batch(config)
    cases = [(mode, config) for mode in ("packed", "dynamic", "fixed")]
    truth, expected = routing_ranks.replay_truth(config, rows)
    own = routing_ranks.choices(config, rows)
    assert truth["actor/moe_replay_changed"] > 0.02
    found = on_ranks(tmp_path, LAYOUTS[layout][0], routing_ranks.replayed_steps, layout, rows, cases)[0]
    for experts, (unchanged, _), (metrics, gradients) in found:
        assert experts.dtype == np.uint8
        assert np.array_equal(np.sort(experts, 2), own.sort(2).values.numpy())
        assert unchanged["actor/moe_replay_changed"] == 0
        assert unchanged["actor/ratio_max"] == 1
        assert {name: metrics[name] for name in truth} == pytest.approx(truth, rel=1e-5, abs=1e-7)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            gap = torch.from_numpy(gradients[name]).double() - gradient
            assert gap.norm() <= 1e-4 * gradient.norm(), name
