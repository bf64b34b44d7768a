"""Running ahead: the next batch is drawn while the actor trains on the current one (`trainer.lead=1`).

    step            1           2           3
    main thread     take 1      take 2      take 3
                    begin 2 ─┐  begin 3 ─┐  begin 4 ─┐
                    train 1  │  train 2  │  train 3  │
                    drain  ◄─┘  drain  ◄─┘  drain  ◄─┘
                    publish     publish     publish
    second thread   draw 2      draw 3      draw 4

A batch is *begun*, then *drawn* (its prompts are chosen, its responses sampled and scored), then *taken* by the step of
its number. Batch 1, and the first after a checkpoint that holds none, is drawn by `take` itself.

Each batch is trained on by exactly one step, and its tokens are at most `lead` policy versions older than the newest:

1. `take` at step b returns batch b, and begins batch b + 1 if the run has such a step. Nothing else begins a batch. So
   batches are begun in order, each once, and at most one waits. It continues the stream of prompts where the one before
   it, which is complete by then, left it. None is ever replaced or dropped.
2. `publish` waits for the batch that was begun before it loads weights (`drain`). So all tokens of a batch have one
   version: the newest at the step that began it.
3. Batch b is begun at step b - 1 or later, and `publish` is called once per step. So at most one version is newer when
   step b takes it. `take` reads the tokens' versions and checks this all the same.
4. A checkpoint is written between steps, when the waiting batch is complete, and holds that batch. So a resumed run
   trains on the same batch, bit for bit, and then draws from the same position of the stream.
5. Every wait ends: the second thread waits for calls of roles only, which have deadlines, and the main thread for the
   second only. That thread is never waited for by a call that it waits for, because a pool that generates runs no role
   of the main thread (`rlpack.config.ahead_rules`).

With `lead=0` a batch is drawn by `take`, in the step's own context, as if this module did not exist.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlpack.background_call import BackgroundCall
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.batch_files import check_lists, read_batch, write_batch
from rlpack.checkpoint.errors import CheckpointError
from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver.draws import Batch, Draw, as_scored
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import StalenessError
from rlpack.safe_files import read_object

# In a checkpoint: a folder with the batches, one folder each, and their list.
FOLDER, _LIST = "ahead", "ahead.json"
# Interval at which a wait for the second thread can be interrupted.
_LOOK_S = 1.0


@dataclass
class _Begun:
    """A batch that was begun.

    Attributes:
        context: where its draw records metrics, timers and the position in the stream of prompts.
        call: the draw, which returns scored rollouts.
    """

    context: StepContext
    call: BackgroundCall[BatchedDataDict] | None = None
    rollouts: BatchedDataDict | None = None

    def drawn(self) -> BatchedDataDict:
        """Return the scored rollouts once they are drawn, or raise what the draw raised."""
        while self.call is not None and not self.call.wait(_LOOK_S):
            pass
        if self.call is not None:
            self.rollouts, self.call = self.call.outcome(), None
        assert self.rollouts is not None
        return self.rollouts


class AheadQueue:
    """The batches of a recipe's steps, drawn up to `trainer.lead` steps ahead."""

    def __init__(self, session: Session, draw: Draw) -> None:
        """Take the recipe's draw, and the batch in the checkpoint that the session was restored from, if any.

        Create it before the first publication of weights: a restored run continues to count policy versions.

        Args:
            session: the run.
            draw: draws the batch of one step, in the context that it gets.

        Raises:
            CheckpointError: the checkpoint's batch can't be read.
        """
        self._session, self._draw_batch = session, draw
        self._lead = session.config.trainer.lead
        self._waiting: _Begun | None = None
        self._taken: _Begun | None = None
        self._is_checked = False
        session.ahead = self
        folder = None if session.restored is None else session.restored / FOLDER
        if self._lead and folder is not None and folder.exists():
            self._restore(folder)

    @property
    def is_drawing(self) -> bool:
        """Return whether a batch is being drawn in the second thread."""
        begun = self._waiting
        if begun is None or begun.rollouts is not None:
            return False
        return begun.call is None or not begun.call.wait(0.0)  # the thread may run before its call is assigned

    def take(self, step: StepContext) -> Batch:
        """Return the batch of a step, and begin the next one; a step that failed and is run again gets the same batch.

        Raises:
            RoleError: drawing the batch failed.
            StalenessError: a token is older than `trainer.lead` policy versions.
            DataError: the batch could not be written to a checkpoint.
        """
        if not self._lead:
            return self._draw_batch(self._session, step)
        if self._taken is None or self._taken.context.number != step.number:
            self._take_next(step)
        assert self._taken is not None
        context, rollouts = self._taken.context, self._taken.drawn()
        step.advance(prompts_consumed=context.progress.prompts_consumed)
        step.metrics |= context.metrics | context.timer.as_metrics()
        step.lag = self._lag(rollouts, step.number)
        step.metrics["rollout/lag"] = float(step.lag)
        if self._waiting is None and step.number < self._session.config.trainer.steps:
            self._waiting = self._context_of(step.number + 1, context.progress.prompts_consumed)
            draw = partial(self._waiting.context.lease.run, partial(self._draw, self._waiting.context))
            self._waiting.call = BackgroundCall(draw, name="draw")
        return Batch(rollouts, as_scored)

    def drain(self) -> None:
        """Wait until the batch that was begun is drawn.

        Raises:
            RoleError: drawing it failed.
        """
        if self._waiting is not None:
            self._waiting.drawn()

    def publish(self, step: StepContext) -> None:
        """Wait for the batch that was begun, and send the actor's weights to the engines (`sync_weights`).

        Raises:
            RoleError: drawing the batch, or the transfer, failed.
        """
        if self._waiting is not None:
            with step.timer("drain"):
                self.drain()
        sync_weights(self._session, step)

    def save(self, folder: Path) -> None:
        """Write the batch that waits, if any, into a checkpoint.

        Raises:
            CheckpointError: a file can't be written.
            RoleError: drawing the batch failed.
        """
        if not self._lead:
            return
        target, entries = folder / FOLDER, []
        try:
            target.mkdir()
            if self._waiting is not None:
                context = self._waiting.context
                write_batch(self._session.store.fetch(self._waiting.drawn()), target / f"step-{context.number}")
                entries.append(
                    {
                        "step": context.number,
                        "prompts_consumed": context.progress.prompts_consumed,
                        "metrics": context.metrics | context.timer.as_metrics(),
                    }
                )
            document = {"policy_version": self._session.rollout_weights.version, "batches": entries}
            (target / _LIST).write_text(json.dumps(document), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"the batch drawn ahead could not be written to {target}: {error}") from error

    def _take_next(self, step: StepContext) -> None:
        """Make the waiting batch the taken one; draw it now if none waits."""
        if self._taken is not None:
            self._taken.context.lease.release()
        if self._waiting is None:
            begun = self._context_of(step.number, step.progress.prompts_consumed)
            begun.rollouts = begun.context.lease.run(partial(self._draw, begun.context))
        else:
            begun, self._waiting = self._waiting, None
            begun.drawn()
        assert begun.context.number == step.number, "batches are taken in order"
        self._taken = begun

    def _context_of(self, number: int, prompts_consumed: int) -> _Begun:
        """Return a batch whose draw is about to begin."""
        progress = replace(self._session.progress, step=number, prompts_consumed=prompts_consumed)
        lease = self._session.store.lease(f"the batch of step {number}")
        return _Begun(StepContext(number, progress, lease=lease))

    def _draw(self, context: StepContext) -> BatchedDataDict:
        """Return the scored rollouts of a step."""
        try:
            rollouts, score = self._draw_batch(self._session, context)
            scored = score(context, rollouts)
        except RoleError as error:
            error.phase, error.step = context.progress.phase, context.number
            raise
        if not self._is_checked:  # at the first step, and not at the first checkpoint
            check_lists(self._session.store.fetch(scored))
            self._is_checked = True
        return scored

    def _lag(self, rollouts: BatchedDataDict, number: int) -> int:
        """Return how many policy versions the oldest token is behind the newest.

        Raises:
            StalenessError: a token has a version outside [newest - lead, newest].
        """
        versions = self._session.store.fetch(rollouts.keep(["policy_version"]))["policy_version"].values
        sampled, newest = versions[versions >= 0], self._session.rollout_weights.version
        if sampled.numel() and not newest - self._lead <= sampled.min() <= sampled.max() <= newest:
            raise StalenessError(
                f"the batch of step {number} has tokens of the policy versions {sampled.min()} to {sampled.max()}; "
                f"with trainer.lead={self._lead} they have to be from {newest - self._lead} to {newest}, the newest"
            )
        return newest - int(sampled.min()) if sampled.numel() else 0

    def _restore(self, folder: Path) -> None:
        """Take over the batch in a checkpoint, and the number of the newest policy version."""
        try:
            document: dict[str, Any] = read_object(folder / _LIST)
            # The first publication sends the weights that already had this number.
            self._session.rollout_weights.version = document["policy_version"] - 1
            for entry in document["batches"]:
                begun = self._context_of(entry["step"], entry["prompts_consumed"])
                begun.context.metrics |= entry["metrics"]
                rollouts = read_batch(folder / f"step-{entry['step']}")
                begun.rollouts = begun.context.lease.run(partial(self._session.store.offload, rollouts))
                self._waiting = begun
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the batch drawn ahead in {folder} can't be read: {error}; choose another run_dir"
            ) from error
