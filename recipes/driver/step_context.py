"""StepContext: the state of one step in progress, which every stage of the step gets.

Invariants (tests/unit/recipes/driver/test_session.py):

1. a step changes nothing of the session's progress before it is committed: it builds the next `Progress` here;
2. metrics and timers belong to one step, so a step that fails leaves nothing in the records of a later one.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from rlpack.algorithms.metric_reduction import reducer_of
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.store import Lease
from rlpack.distributed.calls import Pending
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.observe.console import Sample
from rlpack.observe.draw_times import as_times_of_draw
from rlpack.packing import MicrobatchPlan
from rlpack.packing.analysis.rank_loads import sequence_length_metrics
from rlpack.recipes.driver.progress import Progress
from rlpack.spans import span

logger = logging.getLogger(__name__)

R = TypeVar("R")

# A metric that is summed within an optimizer step is already a mean over tokens or rows, so steps are averaged.
_OVER_STEPS = {"sum": np.mean, "max": np.max, "min": np.min}


class Timers:
    """Seconds spent in the named parts of a step; equal names add up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, label: str | None = None) -> Iterator[None]:
        """Add the time inside to `time/<name>_s`, and record it as the span `label`, or `name`."""
        began = time.perf_counter()
        try:
            with span(name if label is None else label):
                yield
        finally:
            key = f"time/{name}_s"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - began

    def as_metrics(self) -> dict[str, float]:
        """Return the seconds by metric name."""
        return dict(self._seconds)


class _Measurement(Generic[R]):
    """A call whose result only metrics need."""

    def __init__(self, submit: Callable[[], Pending[R]], record: Callable[[R, BatchedDataDict], None]) -> None:
        self._submit, self._record = submit, record
        self._pending: Pending[R] | None = None

    def submit(self) -> Pending[R]:
        """Start the call, unless it was started."""
        if self._pending is None:
            self._pending = self._submit()
        return self._pending

    def record(self, rollouts: BatchedDataDict) -> None:
        """Wait for the call, and record its result."""
        self._record(self.submit().result(), rollouts)


@dataclass
class StepContext:
    """One step in progress, or one evaluation.

    Attributes:
        number: the step of the phase, counted from 1; 0 for the evaluation before the first step.
        progress: the progress once this step is committed; `advance` replaces it.
        lease: holds the payloads that the step stores; released when the step ends.
        metrics: the step's metrics so far.
        timer: `with step.timer("generate"):` measures a part of the step.
        plan: the actor's plan to keep for the packing picture, if any.
        responses: tokens that were generated in each of the plan's rows; None without generation.
        versions: the number of a batch's sampled tokens by policy version; None if they aren't counted yet.
        lag: policy versions between the oldest token of the step's batch and the newest.
        samples: responses to show and store when the step is logged.
        nonfinite_updates: of each trained role, how many optimizer steps had a gradient that isn't finite, and how many
            trained on a token.
        excluded_by: the key of the off-policy correction that excludes every token of the batch, if any.
    """

    number: int
    progress: Progress
    lease: Lease
    metrics: dict[str, float] = field(default_factory=dict)
    timer: Timers = field(default_factory=Timers)
    plan: MicrobatchPlan | None = None
    responses: list[int] | None = None
    versions: Mapping[int, int] | None = None
    lag: int = 0
    samples: list[Sample] = field(default_factory=list)
    nonfinite_updates: dict[str, tuple[int, int]] = field(default_factory=dict)
    excluded_by: str | None = None
    _measurements: list[_Measurement[Any]] = field(default_factory=list)

    def advance(self, **changes: Any) -> None:
        """Replace fields of the progress that this step will commit."""
        self.progress = replace(self.progress, **changes)

    def measure_later(self, submit: Callable[[], Pending[R]], record: Callable[[R, BatchedDataDict], None]) -> None:
        """Defer a call whose result only metrics need until the update is submitted, so that the update doesn't wait.

        Args:
            submit: starts the call, which must not read the weights; `update_actor` calls it.
            record: records the metrics, given the result and the scored rows.
        """
        self._measurements.append(_Measurement(submit, record))

    def submit_measurements(self) -> None:
        """Submit the deferred calls."""
        for measurement in self._measurements:
            measurement.submit()

    def record_pending_metrics(self, rollouts: BatchedDataDict) -> None:
        """Wait for the calls whose results only metrics need, and record them.

        Args:
            rollouts: the step's batch, scored.

        Raises:
            LogprobGapError: see `off_policy.correct_off_policy`.
        """
        self.submit_measurements()
        while self._measurements:
            self._measurements.pop(0).record(rollouts)

    def metrics_of_draw(self) -> dict[str, float]:
        """Return the metrics and times of a batch that was drawn in this context, ahead of the step that takes it.

        Times of a batch that a checkpoint held are among the metrics.
        """
        return self.metrics | as_times_of_draw(self.timer.as_metrics())

    def trainer_idle_share(self, elapsed_s: float) -> float:
        """Return the share of the step's seconds in which it waited for a batch drawn ahead, or for the engines."""
        times = self.timer.as_metrics()
        return (times.get("time/wait_s", 0.0) + times.get("time/drain_s", 0.0)) / elapsed_s

    def discard_calls(self, groups: Mapping[str, WorkerGroup[Any]]) -> None:
        """Discard the results of calls that the step never waited for; running background calls finish unobserved."""
        discarded = [name for group in groups.values() for name in group.discard_submitted()]
        if discarded:
            logger.warning(
                "step %d of %s ended without waiting for %d of its calls, whose results are discarded: %s",
                *(self.number, self.progress.phase, len(discarded), ", ".join(discarded)),
            )

    def record_optimizer_steps(
        self, metrics: Sequence[dict[str, float]], has_tokens: Sequence[bool] | None = None
    ) -> None:
        """Count the actor's optimizer steps, and record the metrics of the given steps, reduced to one number each.

        The count leaves out the critic's steps, and skipped steps, which leave the policy unchanged.

        Args:
            metrics: the metrics of each step.
            has_tokens: whether each step trained on a token; None if all did. The means of a step without tokens are 0,
                so it enters `skipped_steps` alone, unless all are like that.
        """
        measured = metrics if has_tokens is None else list(compress(metrics, has_tokens)) or metrics
        taken = [1.0 - step["actor/skipped_steps"] for step in metrics if "actor/skipped_steps" in step]
        self.advance(optimizer_steps=self.progress.optimizer_steps + round(sum(taken)))
        self.metrics["optimizer_steps"] = self.progress.optimizer_steps
        for name in dict.fromkeys(name for step in metrics for name in step):
            role, _, metric = name.partition("/")
            if metric == "grad_norm":
                norms = [step[name] for step in measured if name in step]
                self.nonfinite_updates[role] = (int(np.sum(~np.isfinite(norms))), len(norms))
        for name in dict.fromkeys(name for step in metrics for name in step):
            is_count = name.endswith("/skipped_steps")
            values = [step[name] for step in (metrics if is_count else measured) if name in step]
            if not values:
                continue
            reduce = np.sum if is_count else _OVER_STEPS[reducer_of(name)]
            logged = name.replace("actor/", "sft_warmup/") if self.progress.phase == "sft_warmup" else name
            self.metrics[logged] = float(reduce(values))

    def report_plan(self, plan: MicrobatchPlan, *, keep: bool = False, responses: Tensor | None = None) -> None:
        """Record the metrics of a plan of the actor, and its ranks' tokens.

        Args:
            plan: the plan.
            keep: store it for the packing picture, and for `rlpack plan` and `rlpack simulate`.
            responses: tokens that were generated in each row, int64 [B], stored with it; None without generation.
        """
        self.metrics |= sequence_length_metrics(plan)
        self.metrics |= {f"packing/{name}": value for name, value in plan.metrics.as_dict().items()}
        if keep:
            self.plan, self.responses = plan, None if responses is None else responses.tolist()
