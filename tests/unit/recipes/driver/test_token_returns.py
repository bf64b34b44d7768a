"""REINFORCE++ with a KL penalty in the rewards, against a loop over tokens in double precision."""

import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm
from rlpack.packing import Batching, make_plan
from rlpack.recipes.driver.policy_stages import compute_advantages
from rlpack.workers.actor import ActorWorker
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import session_of, set_group

SIZES = [(3, 9), (5, 1), (4, 0), (2, 21), (7, 6), (3, 8), (1, 4), (2, 5)]
KL_COEF, EPSILON = 0.3, 1e-3
BATCHINGS = {
    "packed": Batching(mode="packed", max_tokens=32),
    "dynamic": Batching(mode="dynamic", max_tokens=48),
    "fixed": Batching(mode="fixed", micro_batch_size=3, max_tokens=None),
}


def rollouts_of(rewards: list[float], *, spread: float = 2.0) -> BatchedDataDict:
    """Return scored rollouts in pairs, of which the sixth row is quarantined; some log-probs differ by 40 nats."""
    batch = tiny_rollouts(SIZES, group=2)
    mask, generator = batch["response_mask"], torch.Generator().manual_seed(3)
    own, reference = -spread * torch.rand(2, mask.values.shape[0], generator=generator)
    if spread > 0:
        own[::11], reference[::13] = -40.0, -40.0
    valid = torch.arange(len(SIZES)) != 5
    return batch.keep(["input_ids", "response_mask", "group_ids"]).union(
        {
            "logprobs": mask.with_values(own * mask.values),
            "reference_logprobs": mask.with_values(reference * mask.values),
            "response_tokens": mask.count_nonzero(),
            "rewards": torch.tensor(rewards).where(valid, math.nan),
            "valid": valid,
        }
    )


def estimated(
    folder: Path, batch: BatchedDataDict, settings: Algorithm, batching: Batching, ranks: int
) -> tuple[BatchedDataDict, dict[str, float]]:
    """Return the batch with advantages that the ranks' own methods compute on their shards, and the metrics."""
    session = session_of(folder, algorithm=settings)
    plan = make_plan(batch["input_ids"].lengths.numpy(), batching, dp_size=ranks, mini_batch_size=4)
    actor = ActorWorker.__new__(ActorWorker)  # these methods need no model

    def on_ranks(method: Any, rows: BatchedDataDict, *args: Any) -> BatchedDataDict:
        return rows.restore([method(shard, *args) for shard in rows.shard(plan)], plan=plan)

    methods = (actor.token_returns, actor.normalize_advantages)
    set_group(session, "actor", batching, **{method.__name__: partial(on_ranks, method) for method in methods})
    step = session.begin_step(1)
    return compute_advantages(session, step, batch, plan), step.metrics


def expected(batch: BatchedDataDict, settings: Algorithm) -> tuple[list[float], float, float]:
    """Return the advantage of each token, and mean and deviation of the returns."""
    rewards, valid, groups = (batch[name].tolist() for name in ("rewards", "valid", "group_ids"))
    if settings.advantage_arguments.get("center_groups"):
        members = [[r for r, v, g in zip(rewards, valid, groups, strict=True) if v and g == group] for group in groups]
        rewards = [
            reward - statistics.fmean(others) if len(set(others)) > 1 else 0.0
            for reward, others in zip(rewards, members, strict=True)
        ]
    returns: list[list[float | None]] = []
    rows = (batch[name].rows() for name in ("response_mask", "logprobs", "reference_logprobs"))
    for (mask, own, reference), reward, counts in zip(zip(*rows, strict=True), rewards, valid, strict=True):
        total, row = 0.0, [None] * len(mask)
        is_last = True
        for t in reversed(range(len(mask))):
            if not (mask[t] and counts):
                continue
            d = own[t].item() - reference[t].item()
            k3 = min(math.exp(min(-d, 20.0)) - 1 + max(d, -20.0), settings.k3_bound or math.inf)
            kl = {"k1": d, "k2": d * d / 2, "k3": k3, "abs": abs(d)}[settings.kl_estimator]
            total += (reward if is_last else 0.0) - KL_COEF * kl
            is_last, row[t] = False, total
        returns.append(row)
    tokens = [value for row in returns for value in row if value is not None]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    values = [0.0 if v is None else (v - mean) / (deviation + EPSILON) for row in returns for v in row]
    return values, mean, deviation


REWARDS = [1.0, 0.0, 0.25, 0.25, -3.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("center_groups", [False, True])
def test_returns_are_sums_from_each_token_on_normalized_over_the_batch_in_any_layout(
    tmp_path: Path, estimator: Any, center_groups: bool
):
    settings = Algorithm(
        advantage="reinforce_pp",
        advantage_arguments={"center_groups": center_groups, "epsilon": EPSILON},
        kl_coef=KL_COEF,
        kl_placement="reward",
        kl_estimator=estimator,
    )
    batch = rollouts_of(REWARDS)
    values, mean, deviation = expected(batch, settings)
    results = []
    for batching in BATCHINGS.values():
        for ranks in (1, 2, 3):
            found, metrics = estimated(tmp_path, batch, settings, batching, ranks)
            results.append(found["advantages"].values)
            assert metrics["advantage/mean"] == pytest.approx(mean, rel=1e-5)
            assert metrics["advantage/std"] == pytest.approx(deviation, rel=1e-5)
            assert found["loss_weight"][5] == 0
            assert found["rewards"][0] == REWARDS[0]
    torch.testing.assert_close(results[0], torch.tensor(values), rtol=2e-5, atol=1e-6)
    assert all(torch.equal(result, results[0]) for result in results)


def test_equal_rewards_without_divergence_give_no_advantage(tmp_path: Path):
    settings = Algorithm(advantage="reinforce_pp", kl_coef=KL_COEF, kl_placement="reward", kl_estimator="k1")
    batch = rollouts_of([0.3] * 8, spread=0.0)
    found, metrics = estimated(tmp_path, batch, settings, BATCHINGS["packed"], 2)
    assert found["advantages"].values.abs().max() < 1e-8
    assert metrics["advantage/std"] < 1e-8


def test_a_batch_without_valid_rows_has_zero_advantages(tmp_path: Path):
    settings = Algorithm(advantage="reinforce_pp", kl_coef=KL_COEF, kl_placement="reward", kl_estimator="k1")
    batch = rollouts_of(REWARDS).drop(["valid"]).union({"valid": torch.zeros(8, dtype=torch.bool)})
    found, metrics = estimated(tmp_path, batch, settings, BATCHINGS["fixed"], 1)
    assert found["advantages"].values.abs().max() == 0
    assert metrics["advantage/mean"] == 0
