"""BatchRoom: whether the object store has room for a further batch that is drawn ahead.

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
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.started_batch import StartedBatch

logger = logging.getLogger(__name__)

# Bytes per token before any batch is drawn. The arithmetic task stores 25 to 50.
_FIRST_BYTES = 1024.0
# Texts take more or fewer bytes per token from batch to batch.
_MARGIN = 1.25


class BatchRoom:
    """The room that batches take in a run's store, from what they have taken so far."""

    def __init__(self, session: Session) -> None:
        """Start without measurements."""
        self._session = session
        self._lock = threading.Lock()
        self._of_batches = self._of_steps = 0.0  # bytes per token
        self._has_warned = False

    def record_batch(self, lease: Lease, num_tokens: int) -> None:
        """Record the peak of a batch's lease once the batch is drawn; it has `num_tokens` tokens."""
        with self._lock:
            self._of_batches = max(self._of_batches, lease.peak_bytes / max(1, num_tokens))

    def record_step(self, lease: Lease, num_tokens: int) -> None:
        """Record the peak of a step's lease, apart from its batch of `num_tokens` tokens."""
        with self._lock:
            self._of_steps = max(self._of_steps, lease.peak_bytes / max(1, num_tokens))

    def holds_one_more(self, number: int, started: Iterable[StartedBatch]) -> bool:
        """Return whether the batch of step `number` fits in the store with all of these.

        Always true if none of them holds payloads: the batch is then the next to be trained on.

        Args:
            number: its step, for the warning if it doesn't fit.
            started: the batches that were started; those whose payloads were released take no room.
        """
        if math.isinf(self._session.store.budget):
            return True
        with self._lock:
            of_batches, of_steps = self._of_batches or _FIRST_BYTES, self._of_steps or self._of_batches or _FIRST_BYTES
        trainer = self._session.config.trainer
        num_rows = trainer.prompts_per_step * trainer.group_size
        batch = self._bound(of_batches, num_rows)
        taken = [one.context.lease.held_bytes if one.is_drawn else batch for one in started]
        if not any(taken):
            return True
        of_step = num_rows * (1 + trainer.late_groups.share * (trainer.late_groups.window - 1))
        meanwhile = self._bound(of_steps, of_step) + self._bound(of_batches, self._evaluated_rows())
        needed, room = sum(taken) + batch + meanwhile, self._session.store.room(self._session.rollout.ranks.nodes)
        if needed > room and self._of_batches and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the batch of step %d is not drawn yet: with the batches before it, a step and an evaluation it may "
                "take %.3g GB of the object store, and there is room for %.3g GB. It is drawn once earlier batches are "
                "trained on. Raise placement.in_flight_gb or placement.object_store_gb to draw further ahead",
                *(number, needed / 1e9, room / 1e9),
            )
        return needed <= room

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
