"""The policy versions of a batch's tokens, and how far they are behind the newest."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import lengths_of
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import StalenessError
from rlpack.rollout.version_counts import VERSION_COLUMNS


def num_tokens(rollouts: BatchedDataDict) -> int:
    """Return the number of tokens of a rollout batch, those of prompts included."""
    lengths = lengths_of(rollouts["policy_version"])
    assert lengths is not None, "every token has a policy version"
    return int(lengths.sum())


def versions_of(session: Session, rollouts: BatchedDataDict) -> Counter[int]:
    """Return the number of sampled tokens of each policy version.

    Rows whose tokens have one version need only columns that the driver has. Of the others, it fetches a count per
    version. Tokens' own versions are fetched only if the batch lacks `VERSION_COLUMNS`, as in a checkpoint of an
    earlier version of rlpack.
    """
    if not {*VERSION_COLUMNS, "response_lengths"} <= rollouts.keys():
        versions = session.store.fetch(rollouts.keep(["policy_version"]))["policy_version"].values
        return _counter(*torch.unique_consecutive(versions[versions >= 0], return_counts=True))
    num_versions = lengths_of(rollouts["version_counts"])
    assert num_versions is not None, "every row has counts"
    uniform = num_versions == 1
    counter = _counter(rollouts["oldest_version"][uniform], rollouts["response_lengths"][uniform])
    mixed = np.flatnonzero((num_versions > 1).numpy())
    if mixed.size:
        fetched = session.store.fetch(rollouts.keep(["version_counts"]).select(mixed))
        counter.update(_counter(*fetched["version_counts"].values.unbind(1)))
    return counter


def report_lags(session: Session, step: StepContext, versions: Mapping[int, int]) -> None:
    """Record how many policy versions the sampled tokens of a step's batch are behind the newest.

    Args:
        session: the run.
        step: gets `lag` and the metrics.
        versions: see `versions_of`.

    Raises:
        StalenessError: a token has a version outside [newest - max_lag, newest] (`Trainer.max_lag`).
    """
    trainer, newest = session.config.trainer, session.rollout_weights.version
    oldest = newest - trainer.max_lag
    if versions and not oldest <= min(versions) <= max(versions) <= newest:
        width = trainer.late_groups.window
        window = f" and trainer.late_groups.window={width}" if width > 1 else ""
        raise StalenessError(
            f"the batch of step {step.number} has tokens of the policy versions {min(versions)} to {max(versions)}; "
            f"with trainer.lead={trainer.lead}{window} they have to be from {oldest} to {newest}, the newest",
            policy_version=newest,
        )
    lags, total = Counter({newest - version: count for version, count in versions.items()}), sum(versions.values())
    step.lag = max(lags, default=0)
    mean = sum(lag * count for lag, count in lags.items()) / max(1, total)
    step.metrics |= {"rollout/lag": float(step.lag), "rollout/lag_mean": mean}
    step.metrics |= {f"rollout/lag_share/{lag}": lags[lag] / max(1, total) for lag in trainer.measured_lags}


def with_equal_version_columns(parts: Sequence[BatchedDataDict]) -> list[BatchedDataDict]:
    """Return batches of which either all or none have `VERSION_COLUMNS`, so that they can be concatenated.

    Late groups in a checkpoint of an earlier version of rlpack lack these columns.
    """
    if all(set(VERSION_COLUMNS) <= part.keys() for part in parts):
        return list(parts)
    return [part.drop([name for name in VERSION_COLUMNS if name in part]) for part in parts]


def _counter(versions: torch.Tensor, counts: torch.Tensor) -> Counter[int]:
    """Return the sums of `counts` by version; both are integers [n]."""
    distinct, places = torch.unique(versions, return_inverse=True)
    sums = torch.zeros(distinct.shape, dtype=torch.int64).index_add_(0, places, counts.long())
    return Counter(dict(zip(distinct.tolist(), sums.tolist(), strict=True)))
