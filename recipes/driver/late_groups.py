"""A window for stragglers (`trainer.late_groups.window`): a step need not wait for the last groups of its batch.

Step b takes the groups that have ended, of its own batch b and of what is left of earlier batches:

1. It waits until all but `floor(share · P)` of the P groups of batch b have ended, and until all groups have ended
   whose window closes: those of batch b - w + 1 for a window of w steps, and at the last step all of them.
2. It takes every group that has ended and was not taken. A group that is left is late; a later step takes it.
3. If the object store has no room for a batch with late groups next to the following batch and step
   (`rlpack.recipes.driver.batch_room`), it waits for all groups instead. A batch's payloads stay in the store until its
   last group was trained on.

A group of batch b is therefore taken once, at one of the steps b to b + w - 1. Nothing is dropped: the last of these
steps waits for all groups that are left.

**Bound.** Let one publication come every p steps (p = 1 today). Batch b is started at step b - lead or later, so
at most `lead` versions appear before step b takes it (invariant 3 of `rlpack.recipes.driver.ahead`). A group that is
taken at step b + k, 0 <= k <= w - 1, is older by the publications of the k steps from b to b + k - 1, which are at most
ceil(k / p). No token is therefore older than

    lead + ceil((w - 1) / p) versions, which is lead + w - 1 with p = 1 (`Trainer.max_lag`).

`AheadQueue.take` checks the versions of all tokens. With w = 1 nothing here is used.

A batch of a step has between P - floor(share · P) and P + (w - 1) · floor(share · P) groups: the plan, the
mini-batches (`mini_batch_rows`) and all denominators are computed from the rows that it actually has. Which groups
these are depends on timing.

Before a checkpoint is written, the late groups of batches that steps have already taken from are waited for. The
checkpoint holds them, and a resumed run trains on them at its next step. They can't be drawn again without giving long
responses a second chance to be short.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Trainer
from rlpack.recipes.driver.batch_lags import with_equal_version_columns
from rlpack.recipes.driver.groups_by_end import GroupsByEnd, concat_scored
from rlpack.recipes.driver.reward_stages import report_rewards
from rlpack.recipes.driver.rollout_stages import report_lengths
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.started_batch import StartedBatch
from rlpack.recipes.driver.step_context import StepContext

# Metrics of a draw: known once its prompts are drawn, and once all responses are.
_OF_PROMPTS = frozenset({"prompts_consumed", "epoch"})
_OF_DRAW = frozenset({"rollout/repeated_rows", "perf/group_wait_s"})


def mini_batch_rows(trainer: Trainer, num_rows: int) -> int | None:
    """Return the rows of each optimizer step of a batch, None for all: as many steps as usual, of similar size.

    With a fixed `trainer.mini_batch_size`, one group more than usual would be a separate optimizer step, with the same
    total weight as a full mini-batch.

    >>> trainer = Trainer(prompts_per_step=32, group_size=8, mini_batch_size=64)
    >>> [mini_batch_rows(trainer, groups * 8) for groups in (32, 33, 30, 41)]
    [64, 72, 64, 88]
    """
    size, usual = trainer.mini_batch_size, trainer.prompts_per_step * trainer.group_size
    if size is None or num_rows == usual:
        return size
    groups, steps = math.ceil(num_rows / trainer.group_size), math.ceil(usual / size)
    sizes = math.ceil(groups / steps), max(1, groups // steps)
    # The last step has at least half as many groups as the others, if one of the sizes allows that.
    return trainer.group_size * max(sizes, key=lambda count: min(0.5, ((groups - 1) % count + 1) / count))


def set_mini_batches(session: Session, num_rows: int) -> None:
    """Have trained roles divide a batch into about as many optimizer steps as one of the usual size."""
    rows = mini_batch_rows(session.config.trainer, num_rows)
    if rows is None:
        return
    for group in session.groups.values():
        if group.mini_batch_size is not None:
            group.mini_batch_size = rows


class LateGroups:
    """The batches with groups left over, and the choice of the groups that a step takes.

    Attributes:
        batches: batches of which steps have taken some groups and left others, in order.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Start without batches."""
        self.batches: list[StartedBatch] = []
        self._trainer = trainer
        self._finished: list[StartedBatch] = []
        self._number = 0
        self._taken: BatchedDataDict | None = None
        self._metrics: dict[str, float] = {}

    def take(
        self, own: StartedBatch, step: StepContext, while_waiting: Callable[[], None], *, may_leave: bool = True
    ) -> BatchedDataDict:
        """Return the rows of a step; a step that is run again gets the same rows.

        Group ids are distinct across batches, and rows are in the order of the stream of prompts.

        Args:
            own: the batch of the step.
            step: gets the metrics of all rows.
            while_waiting: called repeatedly while this waits.
            may_leave: whether groups may be left to later steps; otherwise this waits for all.

        Raises:
            RoleError: drawing or scoring a batch failed.
        """
        if self._number != step.number or self._taken is None:
            waits_for_all = not may_leave or step.number == self._trainer.steps
            self._wait(own, step.number, while_waiting, waits_for_all=waits_for_all)
            self._taken, self._metrics = self._pop(own, while_waiting)
            self._number = step.number
        step.metrics |= self._metrics
        report_lengths(step, self._taken)
        report_rewards(step, self._taken)
        return self._taken

    def restore(self, batch: StartedBatch, counts: Mapping[str, float]) -> None:
        """Restore a batch from a checkpoint: `rollouts`, which the next step takes, and their failures."""
        assert batch.rollouts is not None
        batch.groups = GroupsByEnd(batch.context)
        batch.groups.add_counts(counts)
        batch.groups.add_scored(batch.rollouts)
        batch.num_taken = self._trainer.prompts_per_step - batch.rollouts["group_ids"].unique().numel()
        self.batches.append(batch)

    @property
    def holding(self) -> list[StartedBatch]:
        """Return the batches whose payloads were not released."""
        return [*self.batches, *self._finished]

    def release(self) -> None:
        """Release the payloads of batches whose last groups were taken before this step."""
        for batch in self._finished:
            batch.context.lease.release()
        self._finished.clear()

    def ended(self, while_waiting: Callable[[], None]) -> list[tuple[StartedBatch, BatchedDataDict]]:
        """Wait until all batches have ended, and return what is left of each; later calls of `take` still return it.

        Raises:
            RoleError: drawing or scoring a batch failed.
        """
        left = []
        for batch in self.batches:
            assert batch.groups is not None
            batch.drawn(while_waiting)
            rows = batch.groups.rows()
            assert rows is not None, "a batch of which no group is left is finished"
            left.append((batch, rows))
        return left

    def _wait(self, own: StartedBatch, number: int, while_waiting: Callable[[], None], *, waits_for_all: bool) -> None:
        """Wait for the groups that step `number` can't do without."""
        count = self._trainer.prompts_per_step
        for batch in self.batches:
            if waits_for_all or batch.context.number + self._trainer.late_groups.window - 1 <= number:
                batch.wait_for_groups(count, while_waiting)
        own.wait_for_groups(count if waits_for_all else count - self._most_late(), while_waiting)

    def _most_late(self) -> int:
        """Return how many groups of its batch a step may leave to later ones."""
        share: float = self._trainer.late_groups.share
        return math.floor(share * self._trainer.prompts_per_step + 1e-9)  # 0.29 · 100 is a little less than 29

    def _pop(self, own: StartedBatch, while_waiting: Callable[[], None]) -> tuple[BatchedDataDict, dict[str, float]]:
        """Return all groups that have ended, and metrics: how many of them are late, how many are left, and others."""
        size, parts, left = self._trainer.prompts_per_step, [], []
        metrics = Counter[str]({"rollout/late_groups": 0.0, "rollout/groups_left": 0.0})
        for batch in (*self.batches, own):
            assert batch.groups is not None
            rows = batch.groups.pop()
            if rows is not None:
                num_groups = rows["group_ids"].unique().numel()
                parts.append(rows.drop(["group_ids"]).union({"group_ids": rows["group_ids"] + size * len(parts)}))
                batch.num_taken += num_groups
                metrics["rollout/late_groups"] += 0 if batch is own else num_groups
            metrics.update(batch.groups.pop_counts())
            if batch.num_taken < size:
                metrics["rollout/groups_left"] += size - batch.num_taken
                left.append(batch)
                continue
            batch.drawn(while_waiting)
            self._finished.append(batch)
            metrics.update(_of_whole_batch(batch.context))
        self.batches = left
        of_prompts = {name: own.context.metrics[name] for name in _OF_PROMPTS & own.context.metrics.keys()}
        return concat_scored(with_equal_version_columns(parts)), metrics | of_prompts


def _of_whole_batch(context: StepContext) -> dict[str, float]:
    """Return the metrics of a draw that are known once all of it has ended; they add up over batches."""
    metrics = context.metrics_of_draw()
    return {name: value for name, value in metrics.items() if name in _OF_DRAW or name.startswith("time/")}
