"""The policy versions of a batch's tokens, and how far they are behind the newest."""

from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import lengths_of
from rlpack.recipes.driver.session import Session
from rlpack.rollout.errors import StalenessError


def num_tokens(rollouts: BatchedDataDict) -> int:
    """Return the number of tokens of a rollout batch, those of prompts included."""
    lengths = lengths_of(rollouts["policy_version"])
    assert lengths is not None, "every token has a policy version"
    return int(lengths.sum())


def versions_of(session: Session, rollouts: BatchedDataDict) -> Tensor:
    """Return the policy version of each token, int32 [T], -1 for those of prompts."""
    return session.store.fetch(rollouts.keep(["policy_version"]))["policy_version"].values


def lags_of(session: Session, versions: Tensor, step: int) -> Tensor:
    """Return how many policy versions each sampled token is behind the newest, int32 [sampled tokens].

    Args:
        session: the run.
        versions: see `versions_of`.
        step: the step whose batch it is, for the error.

    Raises:
        StalenessError: a token has a version outside [newest - max_lag, newest] (`Trainer.max_lag`).
    """
    trainer = session.config.trainer
    sampled, newest = versions[versions >= 0], session.rollout_weights.version
    oldest = newest - trainer.max_lag
    if sampled.numel() and not oldest <= sampled.min() <= sampled.max() <= newest:
        width = trainer.late_groups.window
        window = f" and trainer.late_groups.window={width}" if width > 1 else ""
        raise StalenessError(
            f"the batch of step {step} has tokens of the policy versions {sampled.min()} to "
            f"{sampled.max()}; with trainer.lead={trainer.lead}{window} they have to be from {oldest} to {newest}, "
            "the newest",
            policy_version=newest,
        )
    return newest - sampled
