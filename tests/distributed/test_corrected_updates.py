"""An off-policy corrected update is the same for any batching, on one and two ranks.

The truth is the definition, in float64: weights and criteria from their formulas, one row at a time, then the reference
update over the tokens that are left.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Config, Rollout
from rlpack.config.sections.correction_settings import Correction
from rlpack.packing import Batching, make_plan
from rlpack.recipes.driver.loss_weights import step_weights
from tests.builders import tiny_algorithm, tiny_config
from tests.distributed import actors
from tests.distributed.actors import Outcome
from tests.distributed.definition import counts_of, difference, plain_model, scored, step_by_definition
from tests.distributed.processes import on_ranks

BATCHINGS = {
    "packed": Batching(mode="packed", max_tokens=32),
    "dynamic": Batching(mode="dynamic", max_tokens=48),
    "fixed": Batching(mode="fixed", micro_batch_size=3, max_tokens=None),
}
SIZES = (1, 2)
RATE, TEMPERATURE = 0.02, 0.8
# As in test_equivalence.py: the third response is empty, and the sixth row is quarantined.
ROWS, QUARANTINED = [(3, 9), (5, 1), (4, 0), (2, 21), (7, 6), (3, 8), (1, 4)], 5
CORRECTIONS = {
    "truncated": Correction(weights="token", upper=1.1),
    "sequence": Correction(weights="sequence", upper=1.5),
    "icepop": Correction(weights="token", lower=0.8, upper=1.2),
    "rejection": Correction(weights="token", upper=2.0, reject={"seq_mean_k1": [0.9, 1.1]}),
    "dppo": Correction(bypass=True),
    "bypass": Correction(bypass=True, reject={"seq_mean_k1": [0.9, 1.1]}),
}
NAMES = list(CORRECTIONS)


def config_of(name: str) -> Config:
    # Rejected rows leave other denominators to sequences than to tokens.
    dppo = {"loss": "dppo_tv", "clip_low": 0.02, "clip_high": 0.02, "loss_arguments": {"max_ratio": 20.0}}
    aggregation = "seq_mean_token_mean" if CORRECTIONS[name].reject else "token_mean"
    algorithm = tiny_algorithm(
        correction=CORRECTIONS[name], aggregation=aggregation, **(dppo if name == "dppo" else {})
    )
    return tiny_config(algorithm=algorithm, rollout=Rollout(temperature=TEMPERATURE))


def sampled_batch() -> BatchedDataDict:
    """Return scored rows with log-probs of a sampler, whose distance from the old policy differs by row."""
    batch = scored(ROWS, QUARANTINED, TEMPERATURE)
    old, generator = batch["logprobs"], torch.Generator().manual_seed(2)
    noise = 0.3 * torch.randn(old.values.shape, generator=generator)
    shift = torch.linspace(-0.2, 0.2, len(ROWS))[old.segment_ids]
    sampled = torch.where(batch["response_mask"].values, old.values + noise + shift, 0.0)
    return batch.union({"rollout_logprobs": old.with_values(sampled)})


BATCH = sampled_batch()


def as_updated(name: str) -> BatchedDataDict:
    """Return the rows with the old log-probs that the update reads."""
    if not CORRECTIONS[name].bypass:
        return BATCH
    return BATCH.drop(["logprobs"]).union({"logprobs": BATCH["rollout_logprobs"]})


def correction_by_definition(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weight and whether it trains of each token, f64 and bool [L] per row."""
    weights, kept = [], []
    columns = [BATCH[key].rows() for key in ("logprobs", "rollout_logprobs", "response_mask")]
    for own, other, mask in zip(*columns, strict=True):
        d, inside = (own.double() - other.double()).numpy(), mask.numpy()
        weight, keep = np.ones(len(d)), inside.copy()
        if name in ("truncated", "rejection"):
            weight = np.minimum(np.exp(d), {"truncated": 1.1, "rejection": 2.0}[name])
        elif name == "sequence":
            weight = np.full(len(d), min(np.prod(np.exp(d[inside])), 1.5))
        elif name == "icepop":
            weight = np.where((np.exp(d) < 0.8) | (np.exp(d) > 1.2), 0.0, np.exp(d))
        if CORRECTIONS[name].reject and inside.any() and not 0.9 <= np.exp(-d[inside].mean()) <= 1.1:
            keep[:] = False
        weights.append(torch.from_numpy(weight))
        kept.append(torch.from_numpy(keep))
    return weights, kept


def by_definition(name: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and gradients of one update."""
    weights, kept = correction_by_definition(name)
    batch = as_updated(name).drop(["response_mask"]).union({"response_mask": Ragged.from_rows(kept, torch.bool)})
    model, settings = plain_model(), config_of(name).algorithm
    metrics = step_by_definition(model, batch, range(len(ROWS)), settings, TEMPERATURE, RATE, weights)
    return metrics, {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}


Updates = dict[tuple[str, str, int], tuple[dict[str, float], list[Outcome]]]


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Updates:
    """Correct and update with every correction under every batching, on one and two ranks."""
    found: Updates = {}
    keys = list(itertools.product(NAMES, BATCHINGS))
    for size in SIZES:
        cases = []
        plans = [make_plan(BATCH["input_ids"].lengths.numpy(), BATCHINGS[mode], dp_size=size) for _, mode in keys]
        parts = [(config_of(name), BATCH.shard(plan)) for (name, _), plan in zip(keys, plans, strict=True)]
        ranks = on_ranks(tmp_path_factory.mktemp("corrections"), size, actors.corrections, parts)
        for number, ((name, _), plan) in enumerate(zip(keys, plans, strict=True)):
            batch, settings = as_updated(name), config_of(name).algorithm
            corrected = batch.restore([rank[number] for rank in ranks], plan=plan)
            if settings.correction.weights != "none":
                batch = batch.union(corrected.keep(["importance_weights"]))
            if settings.correction.reject:
                batch = batch.drop(["response_mask"]).union({"response_mask": corrected["kept_mask"]})
            batch = batch.union(step_weights(counts_of(batch), plan, settings))
            cases.append((config_of(name), batch.shard(plan)))
        updates = on_ranks(tmp_path_factory.mktemp("updates"), size, actors.updates, cases, RATE)
        for key, outcomes in zip(keys, zip(*updates, strict=True), strict=True):
            (metrics,) = merge_steps([outcome.results[0] for outcome in outcomes])
            found[*key, size] = (metrics, list(outcomes))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_corrected_update_is_that_of_the_definition(updated: Updates, name: str):
    metrics, gradients = by_definition(name)
    for mode, size in itertools.product(BATCHINGS, SIZES):
        found, outcomes = updated[name, mode, size]
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-9), (mode, size)
        assert len(outcomes) == size
        for outcome in outcomes:
            assert difference(outcome.gradients, gradients) < 1e-4, (mode, size)


def test_every_correction_changes_some_tokens_and_keeps_others():
    masks = BATCH["response_mask"].rows()
    for name in NAMES:
        weights, kept = correction_by_definition(name)
        values = torch.cat([weight[mask] for weight, mask in zip(weights, masks, strict=True)])
        if CORRECTIONS[name].reject:
            rows = [bool(keep.any()) for keep, mask in zip(kept, masks, strict=True) if mask.any()]
            assert 0 < sum(rows) < len(rows)
        elif CORRECTIONS[name].weights != "none":
            bound = {"truncated": 1.1, "sequence": 1.5, "icepop": 0.0}[name]
            assert 0 < (values == bound).sum() < len(values)
    metrics, _ = by_definition("dppo")
    assert 0 < metrics["actor/clip_low_fraction"] + metrics["actor/clip_high_fraction"] < 1
