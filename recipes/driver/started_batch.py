"""A batch of the queue of `rlpack.recipes.driver.ahead`, from the start of its draw."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rlpack.background_call import BackgroundCall
from rlpack.batch.batch import BatchedDataDict
from rlpack.recipes.driver.groups_by_end import GroupsByEnd
from rlpack.recipes.driver.step_context import StepContext

# Interval at which a wait for another thread can be interrupted.
LOOK_S = 1.0


@dataclass
class StartedBatch:
    """A batch whose draw was started.

    Attributes:
        context: where its draw records metrics, timers and the position in the stream of prompts.
        start: position of its first prompt.
        call: the draw, which returns scored rollouts.
        rollouts: what the draw returned.
        groups: its groups as they end, if they may be taken one by one.
        num_taken: how many of them steps have taken.
        needs_engines: whether its draw may still call the engines.
    """

    context: StepContext
    start: int
    call: BackgroundCall[BatchedDataDict] | None = None
    rollouts: BatchedDataDict | None = None
    groups: GroupsByEnd | None = None
    num_taken: int = 0
    needs_engines: bool = True
    _is_settled: threading.Event = field(default_factory=threading.Event)  # it needs no engine, or its draw has ended

    @property
    def is_drawn(self) -> bool:
        """Return whether the draw has ended."""
        return self.rollouts is not None or (self.call is not None and self.call.wait(0.0))

    def drawn(self, while_waiting: Callable[[], None] = lambda: None) -> BatchedDataDict:
        """Return the scored rollouts once they are drawn, or raise what the draw raised."""
        with self.context.lease.awaited():
            while self.call is not None and not self.call.wait(LOOK_S):
                while_waiting()
        if self.call is not None:
            self.rollouts, self.call = self.call.outcome(), None
        assert self.rollouts is not None
        return self.rollouts

    def free_engines(self) -> None:
        """Note that the draw calls no engine from now on: what is left is to score its responses."""
        self.needs_engines = False
        self._is_settled.set()

    def note_end(self) -> None:
        """Note that the draw has ended or failed; called by its thread."""
        self._is_settled.set()

    def wait_for_engines(self, while_waiting: Callable[[], None]) -> None:
        """Return once the draw needs no engine, or has ended; raise what it raised if it failed before that."""
        with self.context.lease.awaited():
            while not self.is_drawn and not self._is_settled.wait(LOOK_S):
                while_waiting()
        if self.needs_engines:
            self.drawn(while_waiting)

    def check_end(self, num_prompts: int) -> None:
        """Check that a batch whose draw has ended took a number of prompts, as `RecipeSpec.draws_once` says.

        The next batch begins behind them: its prompts would be trained on twice, or others not at all.

        Raises:
            ValueError: it took another number.
        """
        taken = self.context.progress.prompts_consumed - self.start
        if taken != num_prompts:
            raise ValueError(
                f"the draw of step {self.context.number} took {taken} prompts, but with RecipeSpec.draws_once every "
                f"draw takes trainer.prompts_per_step = {num_prompts}; draw that many, or set draws_once=False in the "
                "recipe's SPEC"
            )

    def wait_for_groups(self, count: int, while_waiting: Callable[[], None]) -> None:
        """Return once a number of groups have ended, or all have; raise what the draw raised."""
        assert self.groups is not None
        with self.context.lease.awaited():
            while not self.is_drawn and not self.groups.wait(count, LOOK_S):
                while_waiting()
        if self.is_drawn:
            self.drawn()
