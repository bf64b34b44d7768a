"""Running ahead: batches are drawn while the actor trains on earlier ones (`trainer.lead`).

    step            1           2           3
    main thread     take 1      take 2      take 3
                    begin 2 ─┐  begin 3 ─┐  begin 4 ─┐
                    train 1  │  train 2  │  train 3  │
                    drain  ◄─┘  drain  ◄─┘  drain  ◄─┘
                    publish     publish     publish
    other threads   draw 2      draw 3      draw 4

A batch is *begun*, then *drawn* (its prompts are chosen, its responses sampled and scored), then *taken* by the step of
its number. The picture shows `rollout.publish=drain` and a lead of 1. With `rollout.publish=in_flight` there is no
drain: new weights reach engines while they sample, and a response goes on with them. Then a lead of several steps makes
sense: while the last responses of a batch are sampled, the engines' free slots sample the next ones.

Each batch is trained on by exactly one step, and its tokens are at most `lead` policy versions older than the newest:

1. `take` at step b begins all batches up to b + lead that were not begun, in order, and returns batch b. Nothing else
   begins a batch. So each is begun once, at step max(first, b - lead) or later, and at most `lead` wait. None is ever
   replaced or dropped.
2. Batches divide the stream of prompts: each begins where the one before it ends. That is known once that one is drawn,
   or before, if the recipe draws `trainer.prompts_per_step` prompts for every batch (`RecipeSpec.draws_once`). Only
   then are several drawn at a time.
3. `publish` is called once per step. So at most `lead` versions appear between the beginning of batch b and step b,
   which takes it. With drain, `publish` waits for the batch that was begun before it loads weights, so all tokens of a
   batch have one version. `take` reads the tokens' versions and checks all of this nevertheless.
4. A checkpoint is written between steps. With drain it holds the waiting batch, which is drawn by then, so a resumed
   run trains on the same batch, bit for bit, and then draws from the same position of the stream. With in_flight, it
   holds where the waiting batches begin. All of them are drawn again as a whole, from the same positions and seeds,
   with the weights of the checkpoint: every prompt is trained on once. The tokens differ, because the moments of
   publication do. So batches that were drawn are not kept: they tend to be those of short responses, and if the others
   got a second chance to be short, responses of a resumed run would be shorter than those of an uninterrupted one.
5. Every wait ends: the other threads wait for calls of roles only, which have deadlines, and for publications; the main
   thread waits for them. They are never waited for by a call that they wait for, because a pool that generates runs no
   role of the main thread (`rlpack.config.ahead_rules`). If all engines have failed, a thread waits for the next
   publication, which replaces them; while the main thread waits for a batch itself, it replaces them.

With `lead=0` a batch is drawn by `take`, in the step's own context, as if this module did not exist.
"""

import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlpack.background_call import BackgroundCall
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.batch_files import check_lists, read_batch, write_batch
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.recipes import recipe_of
from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver.draws import Batch, Draw, as_scored
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import StalenessError
from rlpack.safe_files import read_object

logger = logging.getLogger(__name__)

# In a checkpoint: a folder with the list of the waiting batches and, with drain, the batches, one folder each.
FOLDER, _LIST = "ahead", "ahead.json"
# Interval at which a wait for another thread can be interrupted.
_LOOK_S = 1.0


@dataclass
class _Begun:
    """A batch that was begun.

    Attributes:
        context: where its draw records metrics, timers and the position in the stream of prompts.
        start: position of its first prompt.
        call: the draw, which returns scored rollouts.
        rollouts: what the draw returned.
    """

    context: StepContext
    start: int
    call: BackgroundCall[BatchedDataDict] | None = None
    rollouts: BatchedDataDict | None = None

    @property
    def is_drawn(self) -> bool:
        """Return whether the draw has ended."""
        return self.rollouts is not None or (self.call is not None and self.call.wait(0.0))

    def drawn(self, while_waiting: Callable[[], None] = lambda: None) -> BatchedDataDict:
        """Return the scored rollouts once they are drawn, or raise what the draw raised."""
        while self.call is not None and not self.call.wait(_LOOK_S):
            while_waiting()
        if self.call is not None:
            self.rollouts, self.call = self.call.outcome(), None
        assert self.rollouts is not None
        return self.rollouts


class AheadQueue:
    """The batches of a recipe's steps, drawn up to `trainer.lead` steps ahead."""

    def __init__(self, session: Session, draw: Draw) -> None:
        """Take the recipe's draw, and the batches in the checkpoint that the session was restored from, if any.

        Create it before the first publication of weights: a restored run continues to count policy versions.

        Args:
            session: the run.
            draw: draws the batch of one step, in the context that it gets.

        Raises:
            CheckpointError: a batch of the checkpoint can't be read.
        """
        self._session, self._draw_batch = session, draw
        self._lead = session.config.trainer.lead
        self._in_flight = session.config.rollout.publish == "in_flight"
        self._draws_once = recipe_of(session.config).draws_once
        self._waiting: deque[_Begun] = deque()
        self._taken: _Begun | None = None
        self._is_checked = self._in_flight  # whose checkpoints hold no batch
        session.ahead = self
        folder = None if session.restored is None else session.restored / FOLDER
        if self._lead and folder is not None and folder.exists():
            self._restore(folder)

    def take(self, step: StepContext) -> Batch:
        """Return the batch of a step, and begin later ones; a step that failed and is run again gets the same batch.

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
        step.metrics["rollout/batches_waiting"] = float(sum(one.is_drawn for one in (self._taken, *self._waiting)))
        with step.timer("wait"):
            rollouts = self._taken.drawn(self._replace_failed_engines)
        context = self._taken.context
        self._begin_until(step.number + self._lead)
        step.advance(prompts_consumed=context.progress.prompts_consumed)
        step.metrics |= context.metrics | context.timer.as_metrics()
        lags = self._lags(rollouts, step.number)
        step.lag = int(lags.max()) if lags.numel() else 0
        step.metrics |= {"rollout/lag": float(step.lag), "rollout/lag_mean": float(lags.sum() / max(1, lags.numel()))}
        for lag in range(self._lead + 1):
            step.metrics[f"rollout/lag_share/{lag}"] = float((lags == lag).sum() / max(1, lags.numel()))
        return Batch(rollouts, as_scored)

    def drain(self) -> None:
        """Wait until all batches that were begun are drawn.

        Raises:
            RoleError: drawing one failed.
        """
        for begun in self._waiting:
            begun.drawn(self._replace_failed_engines)

    def publish(self, step: StepContext) -> None:
        """Send the actor's weights to the engines (`sync_weights`); with drain, once the batch that was begun is drawn.

        Raises:
            RoleError: drawing the batch, or the transfer, failed.
        """
        if self._waiting and not self._in_flight:
            with step.timer("drain"):
                self.drain()
        sync_weights(self._session, step)

    def save(self, folder: Path) -> None:
        """Write into a checkpoint where the batches that wait begin; with drain, the batches, too.

        With in_flight, a batch whose draw has failed is one of them: the steps before it are complete.

        Raises:
            CheckpointError: a file can't be written.
            RoleError: with drain, drawing the batch failed.
        """
        if not self._lead:
            return
        if not self._in_flight:
            self.drain()
        target, entries = folder / FOLDER, []
        try:
            target.mkdir()
            for begun in self._waiting:
                context = begun.context
                entry: dict[str, Any] = {"step": context.number, "start": begun.start, "is_drawn": not self._in_flight}
                if entry["is_drawn"]:
                    write_batch(self._session.store.fetch(begun.drawn()), target / f"step-{context.number}")
                    entry |= {
                        "prompts_consumed": context.progress.prompts_consumed,
                        "metrics": context.metrics | context.timer.as_metrics(),
                    }
                entries.append(entry)
            document = {
                "policy_version": self._session.rollout_weights.version,
                "prompts_per_step": self._session.config.trainer.prompts_per_step,
                "batches": entries,
            }
            (target / _LIST).write_text(json.dumps(document), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"the batches drawn ahead could not be written to {target}: {error}") from error

    def _take_next(self, step: StepContext) -> None:
        """Make the first waiting batch the taken one; draw it now if none waits."""
        if self._taken is not None:
            self._taken.context.lease.release()
        for begun in self._waiting:
            if begun.call is None and begun.rollouts is None:  # of a checkpoint, with in_flight
                self._start(begun)
        if not self._waiting and not self._draws_ahead:
            begun = self._begun(step.number, step.progress.prompts_consumed)
            begun.rollouts = begun.context.lease.run(partial(self._draw, begun.context))
            self._taken = begun
        else:
            if not self._waiting:
                self._begin(step.number, step.progress.prompts_consumed)
            self._taken = self._waiting.popleft()
            self._begin_until(step.number + self._lead if self._draws_ahead else 0)
        assert self._taken.context.number == step.number, "batches are taken in order"

    @property
    def _draws_ahead(self) -> bool:
        """Return whether a batch may be begun before the one before it is drawn."""
        return self._in_flight and self._draws_once

    def _begin_until(self, number: int) -> None:
        """Begin the batches after the last one that was begun, in order, up to that of a step."""
        assert self._taken is not None
        while True:
            last = self._waiting[-1] if self._waiting else self._taken
            if last.context.number >= min(number, self._session.config.trainer.steps):
                return
            if self._draws_ahead:
                start = last.start + self._session.config.trainer.prompts_per_step
            elif last.is_drawn:
                start = last.context.progress.prompts_consumed
            else:
                return
            self._begin(last.context.number + 1, start)

    def _begin(self, number: int, start: int) -> None:
        """Begin the batch of a step."""
        begun = self._begun(number, start)
        self._waiting.append(begun)
        self._start(begun)

    def _start(self, begun: _Begun) -> None:
        """Draw a batch in a thread of its own."""
        begun.call = BackgroundCall(partial(self._draw_in_background, begun.context), name="draw")

    def _draw_in_background(self, context: StepContext) -> BatchedDataDict:
        """Return the scored rollouts of a step; the step raises what this raises, and the log has it at once."""
        try:
            return context.lease.run(partial(self._draw, context))
        except Exception as error:
            logger.warning("the batch of step %d could not be drawn; its step will fail: %s", context.number, error)
            raise

    def _begun(self, number: int, start: int) -> _Begun:
        """Return a batch whose draw is about to begin."""
        progress = replace(self._session.progress, step=number, prompts_consumed=start)
        lease = self._session.store.lease(f"the batch of step {number}")
        return _Begun(StepContext(number, progress, lease=lease), start)

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

    def _replace_failed_engines(self) -> None:
        """Replace the engines if a draw waits for that: the weights are still those that were published last."""
        if self._session.engine_access.needs_engines:
            with self._session.publication():
                self._session.replace_engines()

    def _lags(self, rollouts: BatchedDataDict, number: int) -> Tensor:
        """Return how many policy versions each sampled token is behind the newest, int32 [sampled tokens].

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
        return newest - sampled

    def _restore(self, folder: Path) -> None:
        """Take over the batches in a checkpoint, and the number of the newest policy version."""
        try:
            document: dict[str, Any] = read_object(folder / _LIST)
            self._check_prompts_per_step(folder, document["prompts_per_step"])
            # The first publication sends the weights that already had this number.
            self._session.rollout_weights.version = document["policy_version"] - 1
            for entry in document["batches"]:
                begun = self._begun(entry["step"], entry["start"])
                if entry["is_drawn"]:
                    begun.context.advance(prompts_consumed=entry["prompts_consumed"])
                    begun.context.metrics |= entry["metrics"]
                    rollouts = read_batch(folder / f"step-{entry['step']}")
                    begun.rollouts = begun.context.lease.run(partial(self._session.store.offload, rollouts))
                self._waiting.append(begun)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the batches drawn ahead in {folder} can't be read: {error}; choose another run_dir"
            ) from error

    def _check_prompts_per_step(self, folder: Path, saved: int) -> None:
        """Raise if prompts would be trained on twice or never, because batches begin where others don't end.

        Raises:
            CheckpointError: `trainer.prompts_per_step` has changed.
        """
        number = self._session.config.trainer.prompts_per_step
        if self._draws_ahead and saved != number:
            raise CheckpointError(
                f"trainer.prompts_per_step is {number}, and the batches that were drawn ahead in {folder} have {saved} "
                f"prompts each; resume with trainer.prompts_per_step={saved}, or choose another run_dir"
            )
