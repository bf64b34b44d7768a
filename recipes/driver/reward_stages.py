"""The stage that runs in the background: scoring, from the first part of the rollouts to the last log-prob."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlpack.algorithms.metric_reduction import merge
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.fields import FIELDS
from rlpack.config.schema import Algorithm
from rlpack.distributed.calls import Pending
from rlpack.distributed.errors import RoleError
from rlpack.distributed.results import blank, check_scores
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.session import Session
from rlpack.rewards.reward_result import FAILURES
from rlpack.workers.reward import RewardWorker

# The tokens that roles are sent, by which their batching counts.
SCORED = ("input_ids", "response_mask")
# What a scoring role says of itself, and where the words of its functions begin.
_COUNTED = ("reward_failure", "reward_output_bytes", "reward_retries")
_PART = "reward_"
# What each of several roles gave, and where its words are logged.
_OF_ROLE = "rewards_of_"


class Judgement(NamedTuple):
    """What scoring roles say.

    Attributes:
        rewards: f32 [B].
        valid: whether all roles gave a finite reward, bool [B].
        extras: the columns that they added; of several roles also `rewards_of_<role>` f32 [B], what each of them gave,
            its weight included, and NaN where it gave no finite number.
        counts: metrics: how many rows functions failed on in which way, what they wrote, what was tried again.
    """

    rewards: Tensor
    valid: Tensor
    extras: BatchedDataDict
    counts: dict[str, float]


class _Part(NamedTuple):
    """Rows that one role is at work on: their pending result, and the plan they are sharded by."""

    pending: Pending[BatchedDataDict]
    plan: MicrobatchPlan


class Scoring:
    """Scoring roles at work on one batch, which they may be given in parts.

    Each role begins on a part as soon as it comes; what waits for other processes or machines (a background
    method), or has processes of its own, scores while more is generated and while log-probs are computed.
    """

    def __init__(self, groups: Sequence[WorkerGroup[RewardWorker]]) -> None:
        """Take the roles; none begins yet."""
        self._groups = groups
        self._parts: list[list[_Part]] = [[] for _ in groups]
        self._names: set[str] = set()

    def begin(self, rollouts: BatchedDataDict) -> None:
        """Let all roles begin on these rows: on all columns of texts, and on `input_ids` and `response_mask`."""
        sent = rollouts.keep([*SCORED, *rollouts.names_of("list")])
        self._names.update(rollouts)
        for group, parts in zip(self._groups, self._parts, strict=True):
            parts.append(_Part(group.submit(RewardWorker.score, sent), group.plan(sent)))

    def finish(self, names: Iterable[str] = ()) -> Judgement:
        """Return what all roles say of all rows, once; a row without a finite reward has 0.

        Args:
            names: of columns that the batch has got since then, which no role may add.

        Raises:
            RoleError: a role failed, or returned something else than rewards.
        """
        results: list[Judgement] = []
        of_roles = [f"{_OF_ROLE}{group.role}" for group in self._groups]
        taken = {*FIELDS, *self._names, *names, *Algorithm.model_fields, *of_roles}
        for group, parts in zip(self._groups, self._parts, strict=True):
            results.append(_judged(group, parts, taken))
            taken |= set(results[-1].extras)
        valid = torch.stack([result.valid for result in results]).all(0)
        rewards = torch.stack([result.rewards for result in results]).sum(0)
        valid &= rewards.isfinite()  # two finite ones may add up to more than a number holds
        extras = results[0].extras
        for result in results[1:]:
            extras = extras.union(result.extras)
        if len(results) > 1:
            given = (result.rewards.where(result.valid, torch.nan) for result in results)
            extras = extras.union(dict(zip(of_roles, given, strict=True)))
        return Judgement(rewards.where(valid, 0.0), valid, extras, merge(result.counts for result in results))


def finish_scoring(session: Session, rollouts: BatchedDataDict, scoring: Scoring) -> BatchedDataDict:
    """Add `rewards` f32 [B] and `valid` bool [B], once all scoring roles are done, and the columns that roles add.

    A quarantined row stays in the batch, for order's sake, but none of its tokens counts: it adds to no loss, no
    denominator and no baseline.
    """
    with session.run.timer("reward"):
        rewards, valid, extras, counts = scoring.finish(rollouts)
    count_failures(session, counts)
    scored = rollouts.union({"rewards": rewards, "valid": valid}).union(extras)
    report_rewards(session, scored)
    return scored


def count_failures(session: Session, counts: dict[str, float]) -> None:
    """Add what scoring roles failed on to the figures of the step, which may score more than once."""
    session.metrics |= {name: session.metrics.get(name, 0.0) + count for name, count in counts.items()}


def report_rewards(session: Session, rollouts: BatchedDataDict) -> None:
    """Take over the figures of the step's `rewards`, f32 [B], without quarantined rows, and of functions and roles."""
    rewards, valid = rollouts["rewards"], rollouts["valid"]
    for name, column in rollouts.items():
        for prefix, place in ((_PART, "reward/functions/"), (_OF_ROLE, "reward/roles/")):
            if name.startswith(prefix) and isinstance(column, Tensor) and column.ndim == 1:  # several lie elsewhere
                given = column[~column.isnan()].float()
                mean = given.mean().item() if given.numel() else 0.0
                session.metrics[place + name.removeprefix(prefix)] = mean
    kept = rewards[valid]
    session.metrics |= {
        "reward/mean": kept.mean().item() if kept.numel() else 0.0,
        "reward/std": kept.std(unbiased=False).item() if kept.numel() else 0.0,
        "reward/min": kept.min().item() if kept.numel() else 0.0,
        "reward/max": kept.max().item() if kept.numel() else 0.0,
        "reward/quarantined": float((~valid).sum()),
    }


def _judged(group: WorkerGroup[Any], parts: list[_Part], taken: set[str]) -> Judgement:
    """Return one role's rewards of all parts, and which rows it scored: none that its batching leaves out."""
    method = RewardWorker.score.__name__
    results: list[BatchedDataDict] = []
    planned: list[np.ndarray] = []
    while parts:
        pending, plan = parts.pop(0)  # lets go of what the rows were sent with
        results.append(pending.result())
        check_scores(group.role, method, results[-1], plan, taken, first_row=sum(map(len, planned)))
        planned.append(plan.step_of_row >= 0)
    pairs = list(zip(results, planned, strict=True))
    typed = next((rows for rows, given in pairs if given.any()), results[0])
    try:
        found = BatchedDataDict.concat([rows if given.any() else blank(rows, typed) for rows, given in pairs])
    except DataError as error:
        text = f"what it returned of one part of the batch and of the next can't be put together: {error}"
        raise RoleError(group.role, None, method, text) from error
    valid = ~found["quarantined"] & torch.from_numpy(np.concatenate(planned))
    counted = [name for name in _COUNTED if name in found]
    return Judgement(found["rewards"], valid, found.drop(["rewards", "quarantined", *counted]), _counts(found))


def _counts(found: BatchedDataDict) -> dict[str, float]:
    """Return what a scoring role says of its work: rows failed in which way, output, retries."""
    counts: dict[str, float] = {}
    if "reward_failure" in found:
        of_rows = torch.bincount(found["reward_failure"], minlength=1 + len(FAILURES))[1:].tolist()
        of = dict(zip(FAILURES, map(float, of_rows), strict=True))
        counts["reward/timeouts"], counts["reward/errors"] = of["timeout"], of["error"]
        counts["reward/killed"], counts["reward/invalid"] = of["killed"], of["invalid"]
    if "reward_output_bytes" in found:
        counts["reward/output_bytes"] = float(found["reward_output_bytes"].sum())
    if "reward_retries" in found:
        counts["reward/retries"] = float(found["reward_retries"].sum())
    return counts
