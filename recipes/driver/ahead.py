"""Running ahead: batches are drawn while the actor trains on earlier ones (`trainer.lead`).

    step            1           2           3
    main thread     take 1      take 2      take 3
                    begin 2 ─┐  begin 3 ─┐  begin 4 ─┐
                    train 1  │  train 2  │  train 3  │
                    drain  ◄─┘  drain  ◄─┘  drain  ◄─┘
                    publish     publish     publish
    other threads   draw 2      draw 3      draw 4

A batch is *started*, then *drawn* (its prompts are chosen, its responses sampled and scored), then *taken* by the step
of its number. The picture shows `rollout.publish=drain` and a lead of 1. `drain` waits for the drawn batch, or only for
its responses if scoring calls no engine (`WithoutEngines`) and the scoring roles have pools of their own: then engines
get new weights, and generate the next batch, while this one is scored. With `rollout.publish=in_flight` there is no
drain: new weights reach engines while they sample, and responses continue with them. Then a lead of several steps makes
sense: while the last responses of a batch are sampled, the engines' free slots sample the next ones, and never a later
batch before an earlier one (`rlpack.recipes.driver.engine_slots`).

Each batch is trained on by exactly one step, and its tokens are at most `lead` policy versions older than the newest:

1. `take` at step b starts all batches up to b + lead that were not started, in order, and returns batch b; `publish`
   starts those that had no room before (5.). Nothing else starts a batch. Each is started once, at step
   max(first, b - lead) or later, and at most `lead` wait. None is ever replaced or dropped. `end` declares that no
   further step takes a batch: after the last step, Ctrl-C or an error.
2. Batches divide the stream of prompts: each begins where the one before it ends. That position is known once the
   earlier batch is drawn, or in advance if the recipe draws `trainer.prompts_per_step` prompts for every batch
   (`RecipeSpec.draws_once`). Only in the latter case are several batches drawn at a time; with drain, at most one of
   them is being generated.
3. `publish` is called once per step. At most `lead` versions therefore appear between the start of batch b and step b,
   which takes it. With drain, `publish` waits for the responses of the started batch before it loads weights, so all
   tokens of a batch have one version. `take` nevertheless checks all of this by the tokens' versions.
4. A checkpoint is written between steps. With drain it holds the waiting batch, whose scores it waits for, so a resumed
   run trains on the same batch, bit for bit, and then draws from the same position of the stream. With in_flight, it
   holds where the waiting batches begin. All of them are drawn again as a whole, from the same positions and seeds,
   with the weights of the checkpoint: every prompt is trained on once. The tokens differ, because the times of
   publication do. Batches that were drawn are not kept: they tend to be those with short responses. If the others got a
   second chance to be short, a resumed run would have shorter responses than an uninterrupted one. Groups that
   `trainer.late_groups.window` leaves to later steps are held (`rlpack.recipes.driver.late_groups`).
5. Every wait ends. The other threads wait only for calls of roles, which have deadlines, for publications, and for
   slots that threads of earlier batches also want. The main thread waits for the other threads, but no call that they
   wait for waits for them, because a pool that generates runs no role of the main thread (`rlpack.config.ahead_rules`).
   If all engines have failed, a thread waits for the next publication, which replaces them; while the main thread
   itself waits for a batch, it replaces them. It also replaces them while it waits for an evaluation, which fails if
   the actor has been trained since it began. The other threads may wait for room in the object store. The main thread
   makes room by releasing a step's payloads and its batch, which `publish` does before it waits. If the main thread is
   waiting for a draw, and only its own releases could make room for that draw, the draw fails at once
   (`rlpack.distributed.ray_store`). A batch that could take room that earlier ones, or the step in progress, still need
   isn't started yet (`rlpack.recipes.driver.batch_room`). `publish` starts it once it has released these and the
   evaluation under way has ended, before it loads weights, so with drain the batch has the same tokens as if it had
   been started by `take`.
6. The evaluation after step n has the weights that step n published, bit for bit, and doesn't hold up step n + 1
   (`rlpack.recipes.driver.evaluations`). It is started after `publish` of step n, and `publish` of step n + 1 waits for
   it, so no weights are published meanwhile; its tokens' versions are checked. With drain, engines serve one caller at
   a time. When the evaluation is started, all started batches are generated (3.), and the next one is started after it,
   by `take` of step n + 1, whose draw waits for it. With in_flight, it joins the batches that are being drawn, of which
   only that of step n + 1 goes before it. Neither order adds a publication between the start of a batch and the step
   that takes it, so the bound stays `lead`. The evaluation waits only for calls of roles, so it ends, and then the draw
   and the publication that wait for it do. If the store has no room for it during a step, the run waits for it before
   the step. No step trains during evaluations before the first step and after the last, so these are waited for.

With `lead=0` a batch is drawn by `take`, in the step's own context, as if this module did not exist.
"""

import logging
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlpack.background_call import BackgroundCall
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.recipes import recipe_of
from rlpack.config.roles import scores_apart
from rlpack.distributed.errors import RoleError
from rlpack.observe.metric_values import as_numbers
from rlpack.recipes.driver.ahead_checkpoint import (
    FOLDER,
    check_late_window,
    check_writable,
    read_batches,
    write_batches,
)
from rlpack.recipes.driver.batch_lags import num_tokens, report_lags, versions_of
from rlpack.recipes.driver.batch_room import BatchRoom
from rlpack.recipes.driver.draws import (
    Batch,
    Draw,
    DrawGroups,
    WithoutEngines,
    as_scored,
    check_drawn,
    check_late_draw,
    draw_groups,
)
from rlpack.recipes.driver.engine_slots import turn_of_batch
from rlpack.recipes.driver.engine_weights import check_published, sync_weights
from rlpack.recipes.driver.groups_by_end import GroupsByEnd
from rlpack.recipes.driver.late_groups import LateGroups, set_mini_batches
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.started_batch import StartedBatch
from rlpack.recipes.driver.step_context import StepContext

logger = logging.getLogger(__name__)


class AheadQueue:
    """The batches of a recipe's steps, drawn up to `trainer.lead` steps ahead."""

    def __init__(self, session: Session, draw: Draw, draw_groups: DrawGroups = draw_groups, *, rounds: int = 1) -> None:
        """Store the recipe's draw, and restore the batches in the checkpoint that the session continues from, if any.

        Create it before the first publication of weights: a restored run continues to count policy versions.

        Args:
            session: the run.
            draw: draws the batch of one step, in the context that it gets.
            draw_groups: with `trainer.late_groups.window`, draws the batch of one step group by group instead.
            rounds: most rounds of `trainer.prompts_per_step` prompts that a draw takes.

        Raises:
            CheckpointError: a batch of the checkpoint can't be read.
            TypeError: see `check_late_draw`.
        """
        self._session, self._draw_batch, self._draw_groups = session, draw, draw_groups
        self._lead, self._room = session.config.trainer.lead, BatchRoom(session, rounds)
        self._in_flight = session.config.rollout.publish == "in_flight"
        self._draws_once = recipe_of(session.config).draws_once
        self._scores_apart = scores_apart(session.config)
        self._waiting: deque[StartedBatch] = deque()
        self._taken: StartedBatch | None = None
        self._late = LateGroups(session.config.trainer) if session.config.trainer.late_groups.window > 1 else None
        if self._late is not None:
            check_late_draw(draw, draw_groups)
        self._has_ended = False
        self._failure: Exception | None = None
        self._num_tokens = 0  # of the batch that was taken last
        self._is_checked = self._in_flight and self._late is None  # such runs' checkpoints hold no rows
        session.ahead = self
        folder = None if session.restored is None else session.restored / FOLDER
        if self._lead and folder is not None and folder.exists():
            self._restore(folder)

    def take(self, step: StepContext) -> Batch:
        """Return the batch of a step, and start later ones; a step that failed and is run again gets the same batch.

        Raises:
            RoleError: drawing the batch failed.
            StalenessError: a token is more than `Trainer.max_lag` policy versions old.
            DataError: the batch could not be written to a checkpoint.
            ValueError: see `StartedBatch.check_end`.
        """
        assert not self._has_ended, "a step takes a batch of a queue that has ended"
        if not self._lead:
            return check_drawn(self._draw_batch(self._session, step), self._draw_batch)
        if self._taken is None or self._taken.context.number != step.number:
            self._take_next(step)
        assert self._taken is not None
        step.metrics["rollout/batches_waiting"] = float(sum(one.is_drawn for one in (self._taken, *self._waiting)))
        if self._knows_end(self._taken):
            # With drain, it may be started later: the room that this batch takes is known once it is drawn.
            self._begin_until(step.number + self._lead, has_to=self._in_flight)
        with step.timer("wait"):
            rollouts = self._rollouts_of(step, self._taken)
        if self._knows_end(self._taken):
            self._taken.check_end(self._session.config.trainer.prompts_per_step)
        step.advance(prompts_consumed=self._taken.context.progress.prompts_consumed)
        versions = self._taken.context.versions
        report_lags(self._session, step, versions_of(self._session, rollouts) if versions is None else versions)
        self._begin_until(step.number + self._lead)
        self._num_tokens = num_tokens(rollouts)
        return Batch(rollouts, as_scored)

    def _rollouts_of(self, step: StepContext, own: StartedBatch) -> BatchedDataDict:
        """Return the scored rollouts that a step trains on, and record their metrics."""
        if self._late is not None:
            may_leave = self._room.holds_late_groups(self._holding(), draws_next=not self._waiting)
            rollouts = self._late.take(own, step, self._replace_failed_engines, may_leave=may_leave)
            set_mini_batches(self._session, rollouts.num_rows)
            return rollouts
        rollouts = own.drawn(self._replace_failed_engines)
        step.metrics |= own.context.metrics_of_draw()
        return rollouts

    def drain(self, *, are_scored: bool = False) -> None:
        """Wait until the responses of all started batches are complete, or also scored.

        Raises:
            RoleError: drawing one failed until then.
        """
        for started in self._waiting:
            (started.drawn if are_scored else started.wait_for_engines)(self._replace_failed_engines)

    def publish(self, step: StepContext) -> None:
        """Send the actor's weights to the engines (`sync_weights`), once the evaluation under way has ended.

        With drain, the started batch is drawn by then, too, or at least its responses are complete. If its draw failed,
        nothing is sent, and `raise_failure` raises its error once the step is committed. The step no longer needs its
        batch: with a lead, its payloads and those of the batch are released first, because draws may wait for room.

        Raises:
            RoleError: the evaluation or the transfer failed.
            StalenessError: the evaluation has tokens of other weights than its own.
        """
        if self._lead and self._taken is not None:
            self._room.record_step(step.lease, self._num_tokens)
            step.lease.release()
            self._release_taken()
        if self._session.evaluations.is_under_way:
            with step.timer("drain"):
                self._session.finish_evaluation()
        if self._lead and self._taken is not None:  # batches that had no room before, or not next to the evaluation
            # With in_flight, the next batch can still be started by `take`, after an evaluation that needs its room.
            self._begin_until(step.number + self._lead, has_to=not self._in_flight)
        if self._waiting and not self._in_flight:
            with step.timer("drain"):
                self._failure = self._failure_of_draw(step)
            if self._failure is not None:
                return
        sync_weights(self._session, step)

    def raise_failure(self) -> None:
        """Raise the error of a draw that has failed with drain: a checkpoint would lack its batch.

        Raises:
            RoleError: drawing the batch failed.
            ValueError: see `check_published`.
        """
        if self._failure is not None:
            raise self._failure
        check_published(self._session)
        for started in self._waiting:
            if started.is_drawn and not self._in_flight:
                started.drawn()  # it may have failed while it was scored

    def _failure_of_draw(self, step: StepContext) -> Exception | None:
        """Wait as `drain` does; return the error of a failed draw, or None."""
        try:
            self.drain(are_scored=step.number % self._session.config.checkpoint.every == 0)  # a checkpoint needs them
        except Exception as error:  # noqa: BLE001 - `raise_failure` raises it
            return error
        return None

    def end(self) -> None:
        """End the queue: no more batches are taken or started.

        The run is ending, so draws under way lose their roles; their failure no longer causes a warning.
        """
        self._has_ended = True

    def holds_evaluation(self) -> bool:
        """Return whether the object store has room for an evaluation while the next step trains."""
        started = [one for one in self._holding() if one is not self._taken]
        return self._room.holds_next_step(started, draws_next=not self._waiting)

    def save(self, folder: Path) -> None:
        """Write the start positions of the waiting batches into a checkpoint; with drain, also the batches.

        With in_flight, this includes a batch whose draw has failed: the steps before it are complete. Late groups are
        waited for and written.

        Raises:
            CheckpointError: a file can't be written.
            RoleError: with drain, drawing the batch failed; or a late group could not be drawn.
        """
        if not self._lead:
            return
        late = [] if self._late is None else self._late.ended(self._replace_failed_engines)
        waiting = [(started, None if self._in_flight else started.drawn()) for started in self._waiting]
        write_batches(self._session, folder / FOLDER, [*late, *waiting])

    def _take_next(self, step: StepContext) -> None:
        """Take the first waiting batch; if none is waiting, draw one now."""
        self._release_taken()
        if self._waiting and self._waiting[0].call is None and self._waiting[0].rollouts is None:
            self._start(self._waiting[0])  # restored from a checkpoint, with in_flight
        if not self._waiting and not self._draws_ahead:
            started = self._new_batch(step.number, step.progress.prompts_consumed)
            with step.timer("wait"):
                started.rollouts = started.context.lease.run(partial(self._draw, started))
            self._taken = started
        else:
            if not self._waiting:
                self._begin(step.number, step.progress.prompts_consumed)
            self._taken = self._waiting.popleft()
        assert self._taken.context.number == step.number, "batches are taken in order"

    def _release_taken(self) -> None:
        """Release the payloads of the batches that were trained on."""
        if self._late is not None:
            self._late.release()
        elif self._taken is not None:
            self._taken.context.lease.release()

    @property
    def _draws_ahead(self) -> bool:
        """Return whether a batch may be started before the previous one is drawn."""
        return self._in_flight and self._draws_once

    def _knows_end(self, started: StartedBatch) -> bool:
        """Return whether the batch after this one may be started, although this one isn't drawn."""
        return self._draws_once and (self._in_flight or not started.needs_engines)

    def _begin_until(self, number: int, *, has_to: bool = True) -> None:
        """Start the batches after the last started one that have room, in order, up to a step's batch."""
        assert self._taken is not None
        while not self._has_ended:
            last = self._waiting[-1] if self._waiting else self._taken
            if last.context.number >= min(number, self._session.config.trainer.steps):
                return
            if self._knows_end(last):
                start = last.start + self._session.config.trainer.prompts_per_step
            elif last.is_drawn:
                start = last.context.progress.prompts_consumed
            else:
                return
            if not self._room.holds_one_more(last.context.number + 1, self._holding(), has_to=has_to):
                return
            self._begin(last.context.number + 1, start)

    def _holding(self) -> list[StartedBatch]:
        """Return the batches whose payloads may be in the store."""
        late = [] if self._late is None else self._late.holding
        return list({id(one): one for one in (*late, self._taken, *self._waiting) if one is not None}.values())

    def _begin(self, number: int, start: int) -> None:
        """Start the batch of a step."""
        started = self._new_batch(number, start)
        self._waiting.append(started)
        self._start(started)

    def _start(self, started: StartedBatch) -> None:
        """Draw a batch in a separate thread."""
        if self._late is not None:
            started.groups = GroupsByEnd(started.context)
        self._session.engine_access.slots.expect(turn_of_batch(started.context.number))
        started.call = BackgroundCall(partial(self._draw_in_background, started), name="draw")

    def _draw_in_background(self, started: StartedBatch) -> BatchedDataDict:
        """Return the scored rollouts of a step; an error is logged at once, and raised by the step."""
        context = started.context
        try:
            return context.lease.run(partial(self._draw, started))
        except Exception as error:
            if not self._has_ended:
                logger.warning("the batch of step %d could not be drawn; its step will fail: %s", context.number, error)
            raise
        finally:
            self._session.engine_access.slots.expect_no_more(turn_of_batch(context.number))
            started.note_end()

    def _new_batch(self, number: int, start: int) -> StartedBatch:
        """Return a batch whose draw is about to begin."""
        progress = replace(self._session.progress, step=number, prompts_consumed=start)
        lease = self._session.store.lease(f"the batch of step {number}")
        return StartedBatch(StepContext(number, progress, lease=lease), start)

    def _draw(self, started: StartedBatch) -> BatchedDataDict:
        """Return the scored rollouts of a batch; if it has `groups`, also add them to these group by group."""
        context, groups = started.context, started.groups
        if not self._in_flight:
            self._session.evaluations.wait()
        try:
            if groups is None:
                rollouts, score = check_drawn(self._draw_batch(self._session, context), self._draw_batch)
                if self._scores_apart and isinstance(score, WithoutEngines):
                    context.versions = versions_of(self._session, rollouts)
                    started.free_engines()
                scored = score(context, rollouts)
            else:
                self._draw_groups(self._session, context, groups.add)
                scored = groups.all_scored()
        except RoleError as error:
            error.phase, error.step = context.progress.phase, context.number
            raise
        context.metrics |= as_numbers(context.metrics)  # a checkpoint may hold them
        self._room.record_batch(context.lease, num_tokens(scored))
        if self._late is None and context.versions is None:  # read now: later, ranks may be busy with an evaluation
            context.versions = versions_of(self._session, scored)
        if not self._is_checked:  # so that it fails at the first step rather than the first checkpoint
            check_writable(self._session, scored)
            self._is_checked = True
        return scored

    def _replace_failed_engines(self) -> None:
        """Replace the engines if a draw waits for that: the weights are still those that were published last."""
        if self._session.engine_access.needs_engines:
            with self._session.publication():
                self._session.replace_engines()

    def _restore(self, folder: Path) -> None:
        """Restore the batches in a checkpoint, and the number of the newest policy version."""
        for started, counts in read_batches(self._session, folder, self._new_batch, are_equal=self._draws_ahead):
            if started.context.number > self._session.progress.step:
                if not self._waiting or started.is_drawn:  # others are started like those of a new run
                    self._waiting.append(started)
            else:
                check_late_window(self._session, folder, started.context.number)
                assert self._late is not None
                self._late.restore(started, counts)
