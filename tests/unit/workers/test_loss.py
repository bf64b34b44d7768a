"""Losses are picklable, declare the columns that they read, and need no change in a role."""

import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm
from rlpack.models.policy import TokenScores
from rlpack.workers.loss import LogprobLoss, MicrobatchLoss, PolicyGradientLoss, SFTLoss, ValueLoss, response_values
from tests.builders import tiny_config
from tests.unit.workers.test_actor import actor_of, lesson, shard_of

pytestmark = pytest.mark.usefixtures("process_group")


@dataclass(frozen=True)
class TargetLoss(LogprobLoss):
    """Squared distance of log-probs from a column of targets."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "targets")

    def __call__(
        self, scores: TokenScores, rows: BatchedDataDict, statistics: dict[str, float] | None = None
    ) -> MicrobatchLoss:
        weight, targets = (response_values(rows, name, scores.logprobs) for name in ("loss_weight", "targets"))
        loss = (weight * (scores.logprobs - targets).square()).sum()
        return MicrobatchLoss(loss, {"loss": loss.detach(), "target_mean": (weight * targets).sum()})


def test_a_custom_loss_trains_an_unchanged_actor():
    actor, loss = actor_of(tiny_config()), pickle.loads(pickle.dumps(TargetLoss(temperature=0.5)))
    batch = lesson()
    batch = batch.union({"targets": torch.tensor([-1.0, -2.0, -3.0])}).keep(loss.reads)
    logprobs = batch.restore([actor.logprobs(shard_of(batch), temperature=0.5)])["logprobs"].rows()
    (metrics,) = actor.train_step(shard_of(batch), loss, 0.01)
    masks = batch["response_mask"].rows()
    gaps = torch.cat([row[mask] - target for row, mask, target in zip(logprobs, masks, batch["targets"], strict=True)])
    assert metrics["actor/loss"] == pytest.approx(gaps.square().mean().item(), rel=1e-5)
    assert metrics["actor/target_mean"] == pytest.approx(-(9 * 1 + 1 * 2 + 6 * 3) / 16)
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    "loss", [SFTLoss(), PolicyGradientLoss(Algorithm(loss="kl_cov"), temperature=0.8), ValueLoss(clip=0.2)]
)
def test_losses_are_picklable_after_use(loss: LogprobLoss | ValueLoss):
    if isinstance(loss, PolicyGradientLoss):
        assert loss.needs_statistics  # which looks the function up
    assert pickle.loads(pickle.dumps(loss)) == loss


def summed(tokens: PolicyTokens) -> PolicyLoss:
    none = torch.zeros_like(tokens.mask)
    return PolicyLoss(-tokens.logprobs.sum(), tokens.ratio, none, none)


def without_clipping(tokens: PolicyTokens) -> PolicyLoss:
    return PolicyLoss(-tokens.logprobs, tokens.ratio, None, None)  # pyright: ignore[reportArgumentType]


def bare(tokens: PolicyTokens) -> Tensor:
    return -tokens.logprobs


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"gave a tensor of shape \[\] as token_losses for 2 tokens"),
        ("without_clipping", "gave a NoneType as clipped_low for 2 tokens"),
        ("bare", "returned a Tensor; return a PolicyLoss"),
    ],
)
def test_a_policy_loss_without_an_entry_per_token_is_refused(name: str, message: str):
    column = torch.zeros(2)
    tokens = PolicyTokens(column, column, column, torch.tensor([False, True]), torch.tensor([2]))
    with pytest.raises(AlgorithmError, match=f"algorithm.loss {message}"):
        PolicyGradientLoss(Algorithm(loss=f"{__name__}:{name}"), temperature=1.0).evaluate(tokens)


def test_the_reference_is_read_only_with_a_kl_term():
    loss = PolicyGradientLoss(Algorithm(), temperature=1.0)
    assert "reference_logprobs" not in loss.reads
    assert "reference_logprobs" in loss.with_kl_coef(0.1).reads
    assert loss.with_kl_coef(0.1).with_kl_coef(0.0).reads == loss.reads
