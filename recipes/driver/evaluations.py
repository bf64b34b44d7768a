"""The evaluations of a run: one at a time, in a separate thread while the next step trains (`trainer.lead`).

    step n + 1                 take ─► begin ─► train ─────► finish ─► publish
    evaluation after step n    sample, score ──────────────────┘

`rlpack.recipes.driver.ahead` says why an evaluation samples with the weights of its own step. Invariants
(tests/unit/recipes/driver/test_evaluations.py):

1. an evaluation has ended and is logged before new weights are published, and before the next step is committed;
2. a checkpoint says whether its step's evaluation has still to be started or logged; unless it was logged since then, a
   resumed run evaluates with the weights of the checkpoint;
3. a failed evaluation isn't done: its error is raised in the step that waits for it, and `Session.steps` repeats it.
"""

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from rlpack.background_call import BackgroundCall
from rlpack.distributed.errors import RoleError
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.engine_restarts import weights_are_gone
from rlpack.recipes.driver.progress import Phase
from rlpack.recipes.driver.role_groups import RoleGroups
from rlpack.recipes.driver.step_context import StepContext

logger = logging.getLogger(__name__)

S = TypeVar("S")
Place = tuple[Phase, int]

# Interval at which a wait for the thread can be interrupted.
_LOOK_S = 1.0


class EnginesOnly(Generic[S]):
    """An evaluation that calls only the engines and the reward role, so that the actor may train meanwhile."""

    def __init__(self, evaluate: Callable[[S, StepContext], None]) -> None:
        """Mark a function of the session and the evaluation's context; use it as a decorator."""
        self._evaluate = evaluate

    def __call__(self, session: S, step: StepContext) -> None:
        """Evaluate."""
        self._evaluate(session, step)


def with_seed(groups: Mapping[str, WorkerGroup[Any]], seed: int) -> RoleGroups:
    """Return copies of the groups with a fixed seed, which the next step doesn't change."""
    copies = RoleGroups({name: copy.copy(group) for name, group in groups.items()})
    for group in copies.values():
        group.seed = seed
    return copies


@dataclass
class _UnderWay:
    """An evaluation in progress.

    Attributes:
        place: phase and step after which it was started.
        context: where it records metrics.
        call: its thread.
    """

    place: Place
    context: StepContext
    call: BackgroundCall[None]


class Evaluations:
    """The evaluation under way, if any, and whether one is due.

    Attributes:
        is_due: whether the evaluation after the last step, or before the first, has still to be started, or failed.
    """

    def __init__(self) -> None:
        """Start with the evaluation before the first step."""
        self.is_due = True
        self._under_way: _UnderWay | None = None
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self._lost_at: int | None = None  # `EngineAccess.epoch` when the last engine of the one under way failed

    @property
    def is_under_way(self) -> bool:
        """Return whether an evaluation was started but isn't logged yet."""
        return self._under_way is not None

    def begin(self, place: Place, context: StepContext, evaluate: Callable[[], None]) -> None:
        """Start the evaluation after a step in a separate thread."""
        assert self._under_way is None, "an evaluation is started before the last one was waited for"
        self._lost_at = None
        call = BackgroundCall(partial(self._run, place, context, evaluate), name="evaluate")
        self._under_way, self.is_due = _UnderWay(place, context, call), False

    def wait(self) -> None:
        """Wait until the evaluation under way has ended, even if it fails."""
        under_way = self._under_way
        while under_way is not None and not under_way.call.wait(_LOOK_S):
            pass

    def finish(
        self, access: EngineAccess, optimizer_steps: int, replace_engines: Callable[[], object]
    ) -> StepContext | None:
        """Wait for the evaluation under way, and return its context to log; None if there is none.

        Args:
            access: the turns of generations and publications.
            optimizer_steps: how many the actor has taken.
            replace_engines: gives failed engines the actor's weights; called if the evaluation has lost all engines.

        Raises:
            RoleError: it failed, or it lost all engines and the actor was trained since they got its weights.
            StalenessError: it has tokens of other weights.
        """
        under_way = self._under_way
        if under_way is None:
            return None
        try:
            with under_way.context.lease.awaited():
                while not under_way.call.wait(_LOOK_S):
                    has_none = self._lost_at == access.epoch
                    if has_none and access.optimizer_steps != optimizer_steps:
                        raise weights_are_gone()
                    if has_none:
                        replace_engines()
            under_way.call.outcome()
        except BaseException:
            self.is_due = True
            raise
        finally:
            self._under_way = None
            under_way.context.lease.release()
        return under_way.context

    def lose_engines(self, access: EngineAccess) -> None:
        """Note that all engines of the current thread's evaluation failed; do nothing in other threads."""
        if threading.current_thread() is self._thread:
            self._lost_at = access.epoch

    def end(self) -> None:
        """Give up: the run is ending, so an evaluation under way loses its roles; its failure causes no warning."""
        self._has_ended = True

    def _run(self, place: Place, context: StepContext, evaluate: Callable[[], Any]) -> None:
        """Evaluate; an error is logged at once, and raised by the step that waits."""
        self._thread = threading.current_thread()
        try:
            with context.timer("evaluate"):
                context.lease.run(evaluate)
        except Exception as error:
            if isinstance(error, RoleError) and error.step is None:
                error.phase, error.step = place
            if not self._has_ended:
                logger.warning("the evaluation after step %d failed, and the next step will: %s", place[1], error)
            raise
