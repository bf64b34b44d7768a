"""Reward stages: scoring runs in the background, from the first generated part to the last log-prob."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.metric_reduction import merge_metrics
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.fields import FIELDS
from rlpack.config.schema import Algorithm
from rlpack.distributed.calls import Pending
from rlpack.distributed.errors import RoleError
from rlpack.distributed.results import COUNTERS, check_scores, placeholder_rows
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rewards.reward_result import FAILURES
from rlpack.rollout.engine import STREAMING_ENGINES
from rlpack.workers.reward import RewardWorker

# Prefixes of the reward columns of single functions, and of single roles where several score.
_OF_FUNCTION = "reward_"
_OF_ROLE = "rewards_of_"


# Rows per data rank that one call of a busy role collects at most, up to the last group.
_ROWS_PER_RANK = 4

# Called with the role and the plan of a part that is scored.
OnScored = Callable[[str, MicrobatchPlan], None]


class RowRewards(NamedTuple):
    """The rewards of one or several scoring roles.

    Attributes:
        rewards: f32 [B].
        valid: whether all roles gave a finite reward, bool [B].
        extras: columns that the roles added; with several roles also `rewards_of_<role>` f32 [B], the reward of each,
            its weight included, NaN where it gave no finite number.
        counts: metrics of the scoring: failed rows by kind, output bytes, retries.
    """

    rewards: Tensor
    valid: Tensor
    extras: BatchedDataDict
    counts: dict[str, float]


class _Part(NamedTuple):
    """Rows that one role is scoring, the plan they are sharded by, and their ids."""

    pending: Pending[BatchedDataDict]
    plan: MicrobatchPlan
    row_ids: np.ndarray


class _RoleCalls:
    """The calls of one scoring role for one batch, and rows that wait for one of them to end.

    Attributes:
        parts: the calls, in the order of submission.
    """

    def __init__(self, group: WorkerGroup[RewardWorker]) -> None:
        self.group = group
        self.parts: list[_Part] = []
        self._running: list[Pending[BatchedDataDict]] = []
        self._waiting: list[BatchedDataDict] = []

    def add(self, rollouts: BatchedDataDict, *, collects: bool) -> None:
        """Submit rows; with `collects`, let a few rows wait while the role is busy."""
        self._waiting.append(rollouts)
        num_rows = sum(rows.num_rows for rows in self._waiting)
        if not collects or num_rows >= _ROWS_PER_RANK * self.group.dp_size or not self._is_busy():
            self._submit_waiting()
            if collects and self.parts[-1].pending.answers:  # a background call doesn't say when it ends
                self._running.append(self.parts[-1].pending)

    def end_collecting(self) -> None:
        """Submit the rows that wait."""
        self._running.clear()  # which would keep their results
        if self._waiting:
            self._submit_waiting()

    def _submit_waiting(self) -> None:
        """Submit the rows that wait as one call."""
        row_ids = np.concatenate([rows.row_ids for rows in self._waiting])
        rollouts = BatchedDataDict.concat(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        self._waiting = []
        plan = self.group.plan(rollouts)
        self.parts.append(_Part(self.group.with_plan(plan).submit(RewardWorker.score, rollouts), plan, row_ids))

    def _is_busy(self) -> bool:
        """Return whether calls are running and none has ended since the last group."""
        answered = self.group.ranks.wait_any(self._running, 0.0) if self._running else []
        self._running = [pending for place, pending in enumerate(self._running) if place not in answered]
        return bool(self._running) and not answered


class PendingRewards:
    """The rewards of one batch, computed by scoring roles in the background.

    The batch may be submitted in parts, in any order: results come in the order of the rows' ids, if these are
    distinct, else in the order of submission. A role whose method runs in the background, or has its own processes,
    scores while more is generated and while log-probs are computed.
    """

    def __init__(self, groups: Sequence[WorkerGroup[RewardWorker]]) -> None:
        """Keep the scoring roles; nothing is submitted yet."""
        self._calls = [_RoleCalls(group) for group in groups]
        self._names: set[str] = set()
        self._collects = False

    def submit(self, rollouts: BatchedDataDict) -> None:
        """Submit rows to all roles."""
        self._names.update(rollouts)
        for calls in self._calls:
            calls.add(rollouts, collects=self._collects)

    @contextmanager
    def collecting(self, engine: str) -> Iterator[None]:
        """Let groups that end while a role is busy share its next call; a block around the generation.

        A call that all ranks make together takes about as long for one row as for one row per rank. While such calls
        are running, rows wait until one of them has ended and the next group is submitted, until there are 4 rows per
        data rank, or until the block ends. Background calls cost no rank without rows any time, so nothing waits.

        Args:
            engine: `rollout.engine`. One that generates in parts is reproducible bit for bit, and what shares a call
                with a row may change its rounding, so each of its parts is a separate call.
        """
        self._collects = engine in STREAMING_ENGINES
        try:
            yield
        finally:
            self._collects = False
        for calls in self._calls:
            calls.end_collecting()

    def result(self, names: Iterable[str] = (), on_scored: OnScored = lambda role, plan: None) -> RowRewards:
        """Wait for all roles and return the rewards of all rows; call it once.

        A row without a finite reward gets 0 and is not valid.

        Args:
            names: columns that the batch got in the meantime, which no role may add.
            on_scored: called with the role and the plan of each part, once it is scored.

        Raises:
            RoleError: a role failed, or returned something other than rewards.
        """
        of_roles: list[RowRewards] = []
        role_columns = [f"{_OF_ROLE}{calls.group.role}" for calls in self._calls]
        reserved = {*FIELDS, *self._names, *names, *Algorithm.model_fields, *role_columns}
        for calls in self._calls:
            of_roles.append(_rewards_of_role(calls.group, calls.parts, reserved, self._names, on_scored))
            reserved |= set(of_roles[-1].extras)
        valid = torch.stack([result.valid for result in of_roles]).all(0)
        rewards = torch.stack([result.rewards for result in of_roles]).sum(0)
        valid &= rewards.isfinite()  # the sum of two finite rewards may overflow
        extras = of_roles[0].extras
        for result in of_roles[1:]:
            extras = extras.union(result.extras)
        if len(of_roles) > 1:
            single = (result.rewards.where(result.valid, torch.nan) for result in of_roles)
            extras = extras.union(dict(zip(role_columns, single, strict=True)))
        return RowRewards(rewards.where(valid, 0.0), valid, extras, merge_metrics(result.counts for result in of_roles))


def collect_rewards(
    session: Session, step: StepContext, rollouts: BatchedDataDict, pending: PendingRewards
) -> BatchedDataDict:
    """Wait for all scoring roles, and add `rewards` f32 [B] and `valid` bool [B].

    The rows may be in another order than when they were submitted. The roles may add further columns. A quarantined
    row stays in the batch to keep the order, but none of its tokens counts: it adds to no loss, no denominator and no
    baseline.
    """
    with step.timer("reward"):
        result = pending.result(rollouts, partial(_count_flops, session))
    rewards, valid, extras, counts = _in_order(result, rollouts.row_ids)
    count_failures(step, counts)
    scored = rollouts.union({"rewards": rewards, "valid": valid}).union(extras)
    report_rewards(step, scored)
    return scored


def collect_greedy_rewards(
    session: Session, step: StepContext, rollouts: BatchedDataDict, pending: PendingRewards
) -> BatchedDataDict:
    """Add `greedy_rewards` f32 [B], the reward of the prompt's greedy response.

    Rows of a prompt whose greedy response has no reward are no longer `valid`.
    """
    with step.timer("reward"):
        rewards, valid, _, counts = pending.result(on_scored=partial(_count_flops, session))
    count_failures(step, counts)
    step.metrics["reward/greedy_mean"] = rewards[valid].mean().item() if valid.any() else 0.0
    samples = session.config.trainer.group_size
    both = rollouts["valid"] & valid.repeat_interleave(samples)
    return rollouts.drop(["valid"]).union({"valid": both, "greedy_rewards": rewards.repeat_interleave(samples)})


def check_scored(rollouts: BatchedDataDict, stage: str) -> None:
    """Raise unless rollouts have rewards.

    Args:
        rollouts: the batch.
        stage: name of the stage that reads the rewards.

    Raises:
        AlgorithmError: names the call that a recipe lacks.
    """
    if missing := [name for name in ("rewards", "valid") if name not in rollouts]:
        raise AlgorithmError(
            f"the batch has no column {', '.join(missing)}; call rollouts = score(step, rollouts), which adds them, "
            f"before {stage}"
        )


def count_failures(step: StepContext, counts: dict[str, float]) -> None:
    """Add the failures of scoring roles to those counted in the step so far."""
    step.metrics |= {name: step.metrics.get(name, 0.0) + count for name, count in counts.items()}


def report_rewards(step: StepContext, rollouts: BatchedDataDict) -> None:
    """Record reward metrics without quarantined rows: of the sum, of each function and of each role."""
    rewards, valid = rollouts["rewards"], rollouts["valid"]
    for name, column in rollouts.items():
        for prefix, family in ((_OF_FUNCTION, "reward/functions/"), (_OF_ROLE, "reward/roles/")):
            # Columns [B, k] are in the store.
            if name.startswith(prefix) and isinstance(column, Tensor) and column.ndim == 1:
                numbers = column[~column.isnan()].float()
                if numbers.numel():  # otherwise 0 would look like a reward
                    step.metrics[family + name.removeprefix(prefix)] = numbers.mean().item()
    valid_rewards = rewards[valid]
    step.metrics |= {
        "reward/mean": valid_rewards.mean().item() if valid_rewards.numel() else 0.0,
        "reward/std": valid_rewards.std(unbiased=False).item() if valid_rewards.numel() else 0.0,
        "reward/min": valid_rewards.min().item() if valid_rewards.numel() else 0.0,
        "reward/max": valid_rewards.max().item() if valid_rewards.numel() else 0.0,
        "reward/quarantined": float((~valid).sum()),
    }


def _in_order(result: RowRewards, row_ids: np.ndarray) -> RowRewards:
    """Return rewards in the order of `row_ids`, int64 [B], if these are the ids of the same rows."""
    ids = result.extras.row_ids  # ascending
    if np.array_equal(ids, row_ids) or not np.array_equal(ids, np.sort(row_ids)):
        return result
    order = np.searchsorted(ids, row_ids)
    rows = torch.from_numpy(order)
    return RowRewards(result.rewards[rows], result.valid[rows], result.extras.select(order), result.counts)


def _count_flops(session: Session, role: str, plan: MicrobatchPlan) -> None:
    """Count the FLOPs of a part that a role has scored, if it runs a model."""
    session.performance.count(role, RewardWorker.score, plan, torch.zeros(0, dtype=torch.int64))


def _rewards_of_role(
    group: WorkerGroup[Any],
    parts: list[_Part],
    reserved: set[str],
    given: set[str],
    on_scored: OnScored,
) -> RowRewards:
    """Return one role's rewards of all parts, in order; rows that the role's plans dropped are not valid.

    Args:
        group: the role.
        parts: its calls; they are removed as they end.
        reserved: names that columns added by the role can't have.
        given: names of the parts' columns.
        on_scored: see `PendingRewards.result`.
    """
    ids = np.concatenate([part.row_ids for part in parts])
    numbers = ids if np.unique(ids).size == ids.size else np.arange(ids.size)
    method = RewardWorker.score.__name__
    results: list[BatchedDataDict] = []
    planned: list[np.ndarray] = []
    while parts:
        pending, plan, _ = parts.pop(0)  # drops the reference to the submitted rows
        results.append(pending.result())
        on_scored(group.role, plan)
        first_row = sum(map(len, planned))
        planned.append(plan.step_of_row >= 0)
        part_numbers = numbers[first_row : first_row + len(planned[-1])].tolist()
        check = partial(check_scores, given=given, layout=group.layout, row_numbers=part_numbers)
        check(group.role, method, results[-1], plan, reserved)
    pairs = list(zip(results, planned, strict=True))
    # A part without scored rows gets placeholders, of the column types of a part that has some.
    example = next((rows for rows, scored in pairs if scored.any()), results[0])
    try:
        columns = BatchedDataDict.concat(
            [rows if scored.any() else placeholder_rows(rows, example) for rows, scored in pairs]
        )
    except DataError as error:
        text = f"its results for two parts of the batch can't be concatenated: {error}"
        raise RoleError(group.role, None, method, text) from error
    valid = ~columns["quarantined"] & torch.from_numpy(np.concatenate(planned))
    counted = [name for name in COUNTERS if name in columns]
    extras = columns.drop(["rewards", "quarantined", *counted])
    order = torch.from_numpy(np.argsort(numbers, kind="stable"))
    return RowRewards(columns["rewards"][order], valid[order], extras.select(order), _count_metrics(columns))


def _count_metrics(columns: BatchedDataDict) -> dict[str, float]:
    """Return the metrics of a role's scoring: failed rows by kind, output bytes, retries."""
    counts: dict[str, float] = {}
    if "reward_failure" in columns:
        by_kind = torch.bincount(columns["reward_failure"], minlength=1 + len(FAILURES))[1:].tolist()
        failed = dict(zip(FAILURES, map(float, by_kind), strict=True))
        counts["reward/timeouts"], counts["reward/errors"] = failed["timeout"], failed["error"]
        counts["reward/killed"], counts["reward/invalid"] = failed["killed"], failed["invalid"]
    if "reward_output_bytes" in columns:
        counts["reward/output_bytes"] = float(columns["reward_output_bytes"].sum())
    if "reward_retries" in columns:
        counts["reward/retries"] = float(columns["reward_retries"].sum())
    return counts
