"""BatchRoom: whether the object store has room for a further batch that is drawn ahead, or for late groups.

A batch that takes the room of an earlier one, or of the step in progress, would end the run: it is released after them,
so they can't wait for it. Therefore, a batch is started only if the store has room at the same time for

- all batches that were started, and this one;
- what the step that trains meanwhile stores, such as log-probs;
- an evaluation, which runs during a step.

How much a batch will store isn't known before it is drawn. It is bounded by the most tokens that it can have, with the
most bytes per token that a batch or step of this run has stored so far. Before the first one, every token counts as
`_FIRST_BYTES`.
"""

import logging
import math
import threading
from collections.abc import Iterable

from rlpack.batch.store import Lease
from rlpack.distributed.errors import in_units
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.started_batch import StartedBatch

logger = logging.getLogger(__name__)

# Bytes per token before any batch is drawn. The arithmetic task stores 25 to 50.
_FIRST_BYTES = 1024.0
# Bytes of a step before any step has ended, as a multiple of its batch's. The built-in recipes store up to 1.3 times.
_FIRST_STEP = 4.0
# Texts take more or fewer bytes per token from batch to batch.
_MARGIN = 1.25


class BatchRoom:
    """The room that batches take in a run's store, from what they have taken so far."""

    def __init__(self, session: Session, rounds: int = 1) -> None:
        """Start without measurements.

        Args:
            session: the run.
            rounds: most rounds of `trainer.prompts_per_step` prompts that a draw takes.
        """
        self._session, self._rounds = session, rounds
        self._lock = threading.Lock()
        self._of_batches = self._of_steps = 0.0  # most bytes per token
        self._least_of_batches = math.inf
        self._has_warned = self._has_warned_of_late = False

    def record_batch(self, lease: Lease, num_tokens: int) -> None:
        """Record the peak of a batch's lease once the batch is drawn; it has `num_tokens` tokens."""
        with self._lock:
            of_batch = lease.peak_bytes / max(1, num_tokens)
            self._of_batches = max(self._of_batches, of_batch)
            self._least_of_batches = min(self._least_of_batches, of_batch)

    def record_step(self, lease: Lease, num_tokens: int) -> None:
        """Record the peak of a step's lease, apart from its batch of `num_tokens` tokens."""
        with self._lock:
            self._of_steps = max(self._of_steps, lease.peak_bytes / max(1, num_tokens))

    def holds_one_more(self, number: int, started: Iterable[StartedBatch], *, has_to: bool = True) -> bool:
        """Return whether the batch of step `number` fits in the store with all of these.

        Always true if none of them holds payloads and `has_to` is set: the batch is then the next to be trained on.

        Args:
            number: its step, for the warning if it doesn't fit.
            started: the batches that were started; those whose payloads were released take no room.
            has_to: whether the batch has to be started now if it is the next one; if not, it is asked for again later,
                and there is no warning yet.
        """
        if math.isinf(self._session.store.budget):
            return True
        batch, meanwhile = self._bounds()
        taken = self._taken_by(started, batch)
        if has_to and not taken:
            return True
        needed, room = taken + batch + meanwhile, self._session.store.room(self._session.rollout.ranks.nodes)
        if needed > room and has_to and self._of_batches and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the batch of step %d is not drawn yet: with the batches before it, a step and an evaluation it may "
                "take %s of the object store, and there is room for %s. It is drawn once earlier batches are "
                "trained on. Raise placement.in_flight_gb or placement.object_store_gb to draw further ahead",
                *(number, in_units(needed), in_units(room)),
            )
        return needed <= room

    def holds_next_step(self, batches: Iterable[StartedBatch], *, draws_next: bool) -> bool:
        """Return whether the next step, and an evaluation during it, fit in the store with all of these.

        Args:
            batches: the batches whose payloads are still in the store then.
            draws_next: whether the batch of the next step is not among them.
        """
        if math.isinf(self._session.store.budget):
            return True
        batch, meanwhile = self._bounds()
        needed = self._taken_by(batches, batch) + batch * draws_next + meanwhile
        return needed <= self._session.store.room(self._session.rollout.ranks.nodes)

    def holds_late_groups(self, batches: Iterable[StartedBatch], *, draws_next: bool) -> bool:
        """Return `holds_next_step` for batches of which groups are left; log a warning the first time they don't fit.

        All payloads of a batch stay in the store until its last group was trained on.
        """
        fits = self.holds_next_step(batches, draws_next=draws_next)
        if not fits and self._of_batches and not self._has_warned_of_late:
            self._has_warned_of_late = True
            logger.warning(
                "this step waits for all groups of its batch instead of leaving late ones to the next steps "
                "(trainer.late_groups.window): the object store has no room for a batch with late groups next to the "
                "following batch. Raise placement.in_flight_gb or placement.object_store_gb"
            )
        return fits

    @staticmethod
    def _taken_by(batches: Iterable[StartedBatch], most: float) -> float:
        """Return the bytes that batches take, of which one that isn't drawn yet may take `most`."""
        return sum(one.context.lease.held_bytes if one.is_drawn else most for one in batches)

    def _bounds(self) -> tuple[float, float]:
        """Return the most bytes of a batch, and of a step and an evaluation together."""
        with self._lock:
            of_batches = self._of_batches or _FIRST_BYTES
            # The batch that took the fewest bytes may have taken a single round.
            of_rounds = max(of_batches, self._rounds * min(self._least_of_batches, of_batches))
            # Later steps may store more than the first ones; of the first one, nothing is known.
            of_steps = max(self._of_steps, of_batches) if self._of_steps else _FIRST_STEP * of_batches
        trainer = self._session.config.trainer
        num_rows = trainer.prompts_per_step * trainer.group_size
        of_step = num_rows * (1 + trainer.late_groups.share * (trainer.late_groups.window - 1))
        meanwhile = self._bound(of_steps, of_step) + self._bound(of_batches, self._evaluated_rows())
        return self._bound(of_rounds, num_rows), meanwhile

    def _bound(self, bytes_per_token: float, num_rows: float) -> float:
        """Return the most bytes that responses and their prompts take."""
        config = self._session.config
        row = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        return _MARGIN * bytes_per_token * num_rows * row

    def _evaluated_rows(self) -> int:
        """Return the rows of the largest evaluation; 0 if none runs during a step."""
        if self._session.config.evaluation.every >= self._session.config.trainer.steps:
            return 0  # evaluations before the first step and after the last don't overlap a step
        evaluation = self._session.config.evaluation
        named = self._session.evaluation_sets.items()
        splits = [self._session.held_out, *(split for name, split in named if not evaluation.sets[name].at_end)]
        return max(map(len, splits)) * evaluation.samples
