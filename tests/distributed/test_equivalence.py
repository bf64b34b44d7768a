"""One rollout batch gives one update: the same loss, gradients and metrics for any batching and any number of ranks.

The truth is the definition, in float64: one row at a time through the model's own head, losses added up in Python.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm, Config, Rollout
from rlpack.packing import Batching, MicrobatchPlan, make_plan
from rlpack.recipes.driver.loss_weights import step_weights
from tests.builders import tiny_algorithm, tiny_config
from tests.distributed import actors
from tests.distributed.actors import Outcome
from tests.distributed.definition import counts_of, difference, plain_model, scored, step_by_definition
from tests.distributed.processes import on_ranks

BATCHINGS = {
    "packed": Batching(mode="packed", max_tokens=32),
    "packed_aligned": Batching(mode="packed", max_tokens=40, pad_to_multiple=4, min_microbatches=2),
    "dynamic": Batching(mode="dynamic", max_tokens=48),
    "fixed": Batching(mode="fixed", micro_batch_size=3, max_tokens=None),
}
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")

# Tokens of prompt and response: a prime count of uneven rows, the third with an empty response. The sixth is
# quarantined. One row alone leaves all ranks but one without any; on four ranks, so does an optimizer step of three.
SIZES = (1, 2, 3, 4)
SEVEN = [(3, 9), (5, 1), (4, 0), (2, 21), (7, 6), (3, 8), (1, 4)]
ONE = [(4, 11)]
RATE = 0.02
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Case:
    """An update of one batch.

    Attributes:
        rows: name of the batch.
        aggregation: how token losses become one number.
        mini_batch_size: rows of an optimizer step; None for all.
    """

    rows: str
    aggregation: str
    mini_batch_size: int | None = None

    @property
    def algorithm(self) -> Algorithm:
        return tiny_algorithm(aggregation=self.aggregation)


CASES = [
    *(Case("seven", aggregation, size) for aggregation in AGGREGATIONS for size in (None, 4)),
    *(Case("one", aggregation) for aggregation in AGGREGATIONS),
]


def keys_of(size: int) -> list[tuple[Case, str]]:
    """Return what is updated on `size` ranks: everything on one and two, a part on three and four."""
    if size <= 2:
        return list(itertools.product(CASES, BATCHINGS))
    cases = [case for case in CASES if case.aggregation == "token_mean"]
    return list(itertools.product(cases, ("packed", "dynamic", "fixed")))


def config_of(case: Case) -> Config:
    return tiny_config(algorithm=case.algorithm, rollout=Rollout(temperature=TEMPERATURE))


BATCHES = {"seven": scored(SEVEN, 5, TEMPERATURE), "one": scored(ONE, None, TEMPERATURE)}


def weigh(batch: BatchedDataDict, plan: MicrobatchPlan, settings: Algorithm) -> BatchedDataDict:
    return batch.union(step_weights(counts_of(batch), plan, settings))


def shards_of(case: Case, batching: Batching, size: int) -> list[BatchedDataDict]:
    batch = BATCHES[case.rows]
    plan = make_plan(batch["input_ids"].lengths.numpy(), batching, dp_size=size, mini_batch_size=case.mini_batch_size)
    return weigh(batch, plan, case.algorithm).shard(plan)


def by_definition(case: Case) -> tuple[list[dict[str, float]], Outcome]:
    """Return the metrics of each optimizer step; gradients of the last one, and weights after it."""
    model, batch = plain_model(), BATCHES[case.rows]
    size = case.mini_batch_size or batch.num_rows
    starts = range(0, batch.num_rows, size)
    metrics = [
        step_by_definition(
            model, batch, range(start, min(start + size, batch.num_rows)), case.algorithm, TEMPERATURE, RATE
        )
        for start in starts
    ]
    named = list(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    return metrics, Outcome([], gradients, {name: parameter.detach() for name, parameter in named})


Updates = dict[tuple[Case, str, int], tuple[list[dict[str, float]], list[Outcome]]]


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Updates:
    """Update in every case under every batching, on one to four ranks."""
    found: Updates = {}
    for size in SIZES:
        keys = keys_of(size)
        cases = [(config_of(case), shards_of(case, BATCHINGS[name], size)) for case, name in keys]
        ranks = on_ranks(tmp_path_factory.mktemp("updates"), size, actors.updates, cases, RATE)
        for key, outcomes in zip(keys, zip(*ranks, strict=True), strict=True):
            found[*key, size] = (merge_steps([outcome.results[0] for outcome in outcomes]), list(outcomes))
    return found


def case_name(value: object) -> str | None:
    return f"{value.rows}-{value.aggregation}-{value.mini_batch_size}" if isinstance(value, Case) else None


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_loss_gradients_and_metrics_are_those_of_the_definition(updated: Updates, case: Case):
    metrics, truth = by_definition(case)
    # Nothing that is compared below may be trivially the same.
    assert all(step["actor/loss"] != 0 and step["actor/kl"] > 0.001 for step in metrics)
    for batching, size in itertools.product(BATCHINGS, SIZES):
        if (case, batching) not in keys_of(size):
            continue
        found, outcomes = updated[case, batching, size]
        assert len(found) == len(metrics)
        for step, expected in zip(found, metrics, strict=True):
            assert step == pytest.approx(expected, rel=1e-5, abs=1e-9), (batching, size)
        for outcome in outcomes:
            assert difference(outcome.gradients, truth.gradients) < 1e-5, (batching, size)
            assert difference(outcome.weights, truth.weights) < 1e-5, (batching, size)


def test_updates_on_several_ranks_are_those_of_one(updated: Updates):
    for (case, batching, size), (found, outcomes) in updated.items():
        (alone,), metrics = updated[case, batching, 1][1], updated[case, batching, 1][0]
        for step, expected in zip(found, metrics, strict=True):
            assert step == pytest.approx(expected, rel=1e-5, abs=1e-9), (case, batching, size)
        assert len(outcomes) == size
        assert all(difference(outcome.weights, alone.weights) < 1e-5 for outcome in outcomes), (case, batching, size)


def test_the_cases_differ_in_microbatches():
    lengths = BATCHES["seven"]["input_ids"].lengths.numpy()
    plans = [make_plan(lengths, batching, dp_size=size) for batching in BATCHINGS.values() for size in (1, 2)]
    placed = {
        (tuple(plan.order.tolist()), str(plan.counts.tolist()), str(plan.padded_lengths.tolist())) for plan in plans
    }
    assert len(placed) == len(plans)
    assert all(plan.counts.shape[1] > 1 for plan in plans)
    lone = make_plan(BATCHES["one"]["input_ids"].lengths.numpy(), BATCHINGS["packed"], dp_size=2)
    assert sorted(lone.counts[:, 0].tolist()) == [0, 1]


def test_a_loss_averaged_per_microbatch_would_be_caught(tmp_path: Path):
    case, size = Case("seven", "token_mean"), 2
    batch = BATCHES[case.rows]
    plan = make_plan(batch["input_ids"].lengths.numpy(), BATCHINGS["packed"], dp_size=size)
    weights = weigh(batch, plan, case.algorithm)
    parts = [microbatch.rows for rank in range(size) for microbatch in plan.microbatches(rank, 0)]
    counts = counts_of(batch)
    for rows in map(torch.from_numpy, parts):
        weights["loss_weight"][rows] = 1 / (counts[rows].sum().clamp(min=1) * len(parts))
    found = on_ranks(tmp_path, size, actors.updates, [(config_of(case), weights.shard(plan))], RATE)
    metrics, truth = by_definition(case)
    (step,) = merge_steps([rank[0].results[0] for rank in found])
    assert step["actor/loss"] != pytest.approx(metrics[0]["actor/loss"], rel=1e-2)
    assert difference(found[0][0].gradients, truth.gradients) > 1e-2


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_whose_tokens_are_all_masked_leaves_the_weights_alone(tmp_path: Path, size: int):
    case = Case("seven", "seq_mean_token_mean")
    batch = BATCHES["seven"].copy()
    mask = batch["response_mask"]
    batch["response_mask"] = mask.with_values(torch.zeros_like(mask.values))
    plan = make_plan(mask.lengths.numpy(), BATCHINGS["packed"], dp_size=size)
    shards = weigh(batch, plan, case.algorithm).shard(plan)
    found = on_ranks(tmp_path, size, actors.updates, [(config_of(case), shards)], None)
    (step,) = merge_steps([rank[0].results[0] for rank in found])
    zeros = dict.fromkeys(step, 0.0) | {"actor/learning_rate": step["actor/learning_rate"], "actor/skipped_steps": 1.0}
    assert step == zeros
    before = {name: parameter.float() for name, parameter in plain_model().named_parameters()}
    assert all(torch.equal(weight, before[name]) for name, weight in found[0][0].weights.items())


@pytest.mark.parametrize("batching", BATCHINGS)
def test_ratios_on_the_first_use_of_a_batch_are_exactly_one(tmp_path: Path, batching: str):
    case, size = Case("seven", "token_mean"), 2
    config, batch = config_of(case), BATCHES["seven"]
    plan = make_plan(batch["input_ids"].lengths.numpy(), BATCHINGS[batching], dp_size=size)
    scored_on = on_ranks(tmp_path, size, actors.logprobs, config, batch.shard(plan))
    current = batch.drop(["logprobs"]).union(batch.restore(scored_on, plan=plan).keep(["logprobs"]))
    shards = weigh(current, plan, case.algorithm).shard(plan)
    found = on_ranks(tmp_path, size, actors.updates, [(config, shards)], None)
    (step,) = merge_steps([rank[0].results[0] for rank in found])
    assert step["actor/ratio_max"] == 1.0
    assert step["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert step["actor/clip_low_fraction"] == step["actor/clip_high_fraction"] == 0.0


def test_training_goes_on_alike_from_a_checkpoint_on_fewer_ranks(tmp_path: Path):
    case = Case("seven", "token_mean", mini_batch_size=4)
    config, folder = config_of(case), tmp_path / "actor"
    shards = [shards_of(case, BATCHINGS["packed"], size) for size in (1, 2)]
    two = on_ranks(tmp_path, 2, actors.save_and_go_on, config, shards[1], folder)
    ((loaded, after),) = on_ranks(tmp_path, 1, actors.load_and_go_on, config, shards[0], folder)
    for saved, expected in two:
        assert all(torch.equal(loaded.weights[name], weight) for name, weight in saved.weights.items())
        # AdamW divides by gradients, so a weight whose gradient is near zero moves by rounding alone.
        assert difference(after.weights, expected.weights) < 1e-3
    metrics = [merge_steps([rank[1].results[0] for rank in two]), merge_steps([after.results[0]])]
    for expected, step in zip(*metrics, strict=True):
        assert step == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("size", [1, 2])
def test_a_clipped_gradient_is_the_whole_models_scaled_to_the_norm(tmp_path: Path, size: int):
    case, largest = Case("seven", "token_mean"), 0.01
    config = config_of(case)
    optimizer = config.actor.optimizer.model_copy(update={"max_grad_norm": largest})
    clipped = config.model_copy(update={"actor": config.actor.model_copy(update={"optimizer": optimizer})})
    cases = [(clipped, shards_of(case, BATCHINGS["packed"], size))]
    found = on_ranks(tmp_path, size, actors.updates, cases, RATE)
    (metrics,), truth = by_definition(case)
    norm = metrics["actor/grad_norm"]
    assert norm > 10 * largest
    (step,) = merge_steps([rank[0].results[0] for rank in found])
    assert step["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    expected = {name: gradient * (largest / norm) for name, gradient in truth.gradients.items()}
    for rank in found:
        assert difference(rank[0].gradients, expected) < 1e-3
