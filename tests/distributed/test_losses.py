"""Every policy loss under every aggregation gives one update, however its batch is cut and on any number of ranks.

The truth is `tests.distributed.definition`: one row at a time, each loss from its paper's formula. In `make test`, each
loss meets every aggregation and every batching mode, and so does each aggregation; `make test-long` runs the product.
"""

import itertools

import pytest
import torch

from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.algorithms.registry import LOSSES
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm, Config, Rollout
from rlpack.packing import Batching, make_plan
from rlpack.recipes.driver.loss_weights import step_weights
from tests.builders import tiny_algorithm, tiny_config
from tests.distributed import actors
from tests.distributed.definition import counts_of, difference, plain_model, scored, step_by_definition
from tests.distributed.processes import on_ranks

BATCHINGS = {
    "packed": Batching(mode="packed", max_tokens=96),
    "dynamic": Batching(mode="dynamic", max_tokens=160),
    "fixed": Batching(mode="fixed", micro_batch_size=7, max_tokens=None),
}
# Least numbers of microbatches, by number of ranks. Two ranks split the batch in any case.
MICROBATCHES = {1: (1, 4), 2: (4,)}
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum")
RATE, TEMPERATURE = 0.02, 0.8
# The third response is empty; the sixth row is quarantined.
BATCH = scored([(3, 9), (5, 1), (4, 0), (2, 21), (7, 6), (3, 8), (1, 4)], 5, TEMPERATURE)

# Settings under which bounds bind at some of the tokens and not at others.
SETTINGS = {
    "ppo_clip": {"dual_clip": 1.5},
    "gspo": {"clip_low": 0.03, "clip_high": 0.03},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.25, "kl_estimator": "abs"},
    "cispo": {"clip_low": 1.0, "entropy_coef": 0.05, "k3_bound": 0.1},
    "sapo": {"loss_arguments": {"tau_positive": 1.0, "tau_negative": 1.7}},
    "dppo_tv": {"clip_low": 0.002, "clip_high": 0.004, "loss_arguments": {"max_ratio": 1.3}},
    "dppo_kl": {"clip_low": 3e-4, "clip_high": 5e-4, "loss_arguments": {"max_ratio": 1.3}},
    "reinforce": {"kl_estimator": "k1", "kl_straight_through": True},
    "kl_cov": {"loss_arguments": {"share": 0.2, "coef": 0.7}},
}


def algorithm_of(loss: str, aggregation: str) -> Algorithm:
    return tiny_algorithm(loss=loss, aggregation=aggregation, **SETTINGS[loss])


def modes_of(loss: str, aggregation: str, *, every: bool) -> list[str]:
    """Return the batching modes in which a loss runs under an aggregation: all, or one of them in turn."""
    modes, turn = list(BATCHINGS), list(SETTINGS).index(loss) + AGGREGATIONS.index(aggregation)
    return modes if every else [modes[turn % len(modes)]]


Found = dict[tuple[str, str, str, int, int], tuple[dict[str, float], dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def updated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Take all updates; those of one number of ranks share their processes, if there are not too many."""
    found: Found = {}
    every = request.config.getoption("--long")
    for size, losses in itertools.product(MICROBATCHES, [[loss] for loss in SETTINGS] if every else [list(SETTINGS)]):
        keys = [
            (loss, aggregation, mode, microbatches)
            for loss, aggregation in itertools.product(losses, AGGREGATIONS)
            for mode in modes_of(loss, aggregation, every=every)
            for microbatches in MICROBATCHES[size]
        ]
        cases = [case_of(*key, size) for key in keys]
        ranks = on_ranks(tmp_path_factory.mktemp("updates"), size, actors.gradients, cases, RATE)
        for key, outcomes in zip(keys, zip(*ranks, strict=True), strict=True):
            (metrics,) = merge_steps([results for results, _ in outcomes])
            found[*key, size] = metrics, {name: torch.from_numpy(array) for name, array in outcomes[0][1].items()}
    return found


def case_of(
    loss: str, aggregation: str, mode: str, microbatches: int, size: int
) -> tuple[Config, list[BatchedDataDict]]:
    """Return the configuration, and the shards of the batch."""
    settings = algorithm_of(loss, aggregation)
    batching = BATCHINGS[mode].override(min_microbatches=microbatches)
    plan = make_plan(BATCH["input_ids"].lengths.numpy(), batching, dp_size=size)
    assert plan.counts.shape[1] >= microbatches
    shards = BATCH.union(step_weights(counts_of(BATCH), plan, settings)).shard(plan)
    return tiny_config(algorithm=settings, rollout=Rollout(temperature=TEMPERATURE)), shards


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", SETTINGS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["in turn", "all modes"])
def test_value_gradients_and_metrics_are_those_of_the_definition(
    updated: Found, loss: str, aggregation: str, every: bool
):
    model, settings = plain_model(), algorithm_of(loss, aggregation)
    truth = step_by_definition(model, BATCH, range(BATCH.num_rows), settings, TEMPERATURE, RATE)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert truth["actor/loss"] != 0
    pairs = [(size, least) for size, leasts in MICROBATCHES.items() for least in leasts]
    for mode, (size, microbatches) in itertools.product(modes_of(loss, aggregation, every=every), pairs):
        metrics, found = updated[loss, aggregation, mode, microbatches, size]
        assert metrics == pytest.approx(truth, rel=1e-5, abs=1e-7), (mode, microbatches, size)
        assert difference(found, gradients) < 1e-5, (mode, microbatches, size)


def test_every_loss_is_in_the_matrix_and_its_bounds_bind_somewhere(updated: Found):
    assert set(SETTINGS) == set(LOSSES)
    modes = {loss: modes_of(loss, "token_mean", every=False)[0] for loss in SETTINGS}
    metrics = {loss: updated[loss, "token_mean", mode, 1, 1][0] for loss, mode in modes.items()}
    for loss in ("ppo_clip", "gspo", "gmpo", "dppo_tv", "dppo_kl", "kl_cov"):
        assert 0 < metrics[loss]["actor/clip_low_fraction"] + metrics[loss]["actor/clip_high_fraction"] < 1
    assert 0 < metrics["cispo"]["actor/kl_bounded_fraction"] < 1
    values = {loss: metrics[loss]["actor/policy_loss"] for loss in SETTINGS}
    assert len(set(values.values())) == len(values)
