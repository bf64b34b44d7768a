"""Session: one run in progress, its started roles, its prompts and its progress.

Invariants (tests/unit/recipes/driver/test_session.py):

1. `Progress` changes only when a step is committed, so a step that failed before its update can be run again and draws
   the same prompts and random numbers. By then, all calls of the failed attempt have ended except background calls that
   are already running, and their results are discarded.
2. After Ctrl-C, the step in progress is completed and saved before the run ends.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlpack.batch.store import LocalStore, Store
from rlpack.config.recipes import recipe_of
from rlpack.config.redaction import without_secrets
from rlpack.config.roles import scores
from rlpack.config.schema import Config
from rlpack.data.sampler import step_seed
from rlpack.distributed.restarts import Restarts
from rlpack.distributed.weights import WeightChannel
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.observe.run import Run
from rlpack.observe.run_dir import record_hashes
from rlpack.recipes.driver import engine_restarts
from rlpack.recipes.driver.ahead_protocol import Ahead
from rlpack.recipes.driver.checkpoint_writer import CheckpointWriter
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.evaluations import EnginesOnly, Evaluations, Place, with_seed
from rlpack.recipes.driver.gradient_watch import GradientWatch
from rlpack.recipes.driver.logprob_gap import LogprobGapLimit
from rlpack.recipes.driver.performance import PerformanceMeter
from rlpack.recipes.driver.progress import Phase, Progress
from rlpack.recipes.driver.resume import LoadedCheckpoint, resumed_note
from rlpack.recipes.driver.splits import Split
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.canary import canary_tokens
from rlpack.spans import span
from rlpack.user_code import Interrupted
from rlpack.worker import Trainable
from rlpack.workers.actor import ActorWorker
from rlpack.workers.critic import CriticWorker
from rlpack.workers.reference import ReferenceWorker
from rlpack.workers.reward import RewardWorker
from rlpack.workers.rollout import RolloutWorker

Evaluate = Callable[["Session", StepContext], None]


@dataclass
class Session:
    """A run in progress.

    Attributes:
        config: the whole configuration.
        run: the run's directory, sinks, timers and Ctrl-C handler.
        tokenizer: the policy's tokenizer.
        prompts: training split.
        held_out: evaluation split.
        groups: the started roles by name.
        store: holds the tokens and texts of batches.
        progress: completed steps; frozen, replaced when a step is committed.
        step: the step in progress, or the last one; None before the first.
        evaluations: the evaluation under way, if any, and whether one is due.
        completed: phase and step of the last commit whose checkpoint, if due, was written or started.
        reference_hashes: hashes of the stored reference's weight files; None if the recipe stored none.
        evaluation_sets: the splits of `evaluation.sets` by name.
        performance: turns the FLOPs of a step into rates.
        ahead: the batches that are drawn ahead of their steps; None before the recipe's own steps.
        restored: folder of the checkpoint that the run continues from, if any.
        warned_mismatch: metrics of mismatch that the run has warned of.
        thread: the thread that runs the recipe's steps.
        restarts: the restarts of stateless roles.
        gradients: ends the run if gradients stay NaN or infinite.
        engine_access: the turns of generations and publications.
    """

    config: Config
    run: Run
    tokenizer: PreTrainedTokenizerBase
    prompts: Split
    held_out: Split
    groups: dict[str, WorkerGroup[Any]]
    store: Store = field(default_factory=LocalStore)
    progress: Progress = field(default_factory=Progress)
    step: StepContext | None = None
    evaluations: Evaluations = field(default_factory=Evaluations)
    completed: Place | None = None
    reference_hashes: Mapping[str, str] | None = None
    evaluation_sets: dict[str, Split] = field(default_factory=dict)
    performance: PerformanceMeter = field(default_factory=PerformanceMeter)
    ahead: Ahead | None = None
    restored: Path | None = None
    warned_mismatch: set[str] = field(default_factory=set)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    restarts: Restarts = field(default_factory=Restarts)
    gradients: GradientWatch = field(default_factory=GradientWatch)
    engine_access: EngineAccess = field(init=False)

    def __post_init__(self) -> None:
        """Create what follows from the configuration."""
        self.engine_access = EngineAccess(are_concurrent=self.config.rollout.publish == "in_flight")

    @property
    def actor(self) -> WorkerGroup[ActorWorker]:
        """Return the trained policy's ranks."""
        return self.groups["actor"]

    @property
    def rollout(self) -> WorkerGroup[RolloutWorker]:
        """Return the generating ranks."""
        return self.groups["rollout"]

    @cached_property
    def rollout_weights(self) -> WeightChannel[ActorWorker, RolloutWorker]:
        """Return the channel of the actor's weights to the engines; it counts policy versions."""
        channel = WeightChannel(self.actor, self.rollout)
        engine_restarts.keep_weights(channel, self.config, self.store)
        settings = (self.rollout, channel, self.config.rollout.engine, canary_tokens(len(self.tokenizer)), self.thread)
        self.rollout.ranks.after_restart("engines", partial(engine_restarts.restore_engines, *settings))
        return channel

    @cached_property
    def logprob_gap_limit(self) -> LogprobGapLimit:
        """Return the limit on the gap between the trainer's and the sampler's log-probs."""
        return LogprobGapLimit.from_config(self.config)

    @property
    def critic(self) -> WorkerGroup[CriticWorker]:
        """Return the critic's ranks."""
        return self.groups["critic"]

    @property
    def reference(self) -> WorkerGroup[ReferenceWorker] | None:
        """Return the frozen policy's ranks; None without a KL term."""
        return self.groups.get("reference")

    @property
    def scorers(self) -> list[WorkerGroup[RewardWorker]]:
        """Return all scoring roles: reward functions, the reward model, and roles that users add."""
        return [group for name, group in self.groups.items() if scores(self.config, name)]

    @property
    def trained(self) -> dict[str, WorkerGroup[Any]]:
        """Return the roles that the recipe trains, by name: they are saved, resumed and exported."""
        return {name: self.groups[name] for name in recipe_of(self.config).trains}

    @property
    def kl_coef(self) -> float:
        """Return the weight of the KL term: the configured one, or the adapted one."""
        settings, adapted = self.config.algorithm, self.progress.kl_coef
        return settings.kl_coef if adapted is None or settings.kl_target is None else adapted

    def steps(self, phase: Phase, total: int, evaluate: Evaluate | None = None) -> Iterator[StepContext]:
        """Yield the remaining steps of a phase.

        A step is committed when the loop asks for the next one: its metrics are logged, and evaluation and checkpoint
        follow if they are due. With a lead, the evaluation may end only while the next step is in progress. After
        Ctrl-C a checkpoint is written and the run ends. A step whose body raises is not committed: calling `steps`
        again repeats it, as it does an evaluation or checkpoint that raised. A phase that an earlier run completed
        yields nothing.
        """
        if self.progress.phase != phase:
            if phase == "sft_warmup":
                return
            self.progress, self.evaluations.is_due = replace(self.progress, phase=phase, step=0), True
        self.stop_if_interrupted()
        with self.run.progress(total - self.progress.step, phase) as bar:
            self._continue_steps(total, evaluate)
            for number in range(self.progress.step + 1, total + 1):
                began = time.perf_counter()
                step = self.begin_step(number)
                with step.lease, step.timer("step", f"{phase} step {number}"):
                    yield step
                self._commit(step, time.perf_counter() - began, total)
                bar.advance()
                self._complete_step(total, evaluate)

    def begin_step(self, number: int) -> StepContext:
        """Return the context of a step, after discarding what the last one left: payloads, and calls not waited for.

        Raises:
            RoleError: such a call failed.
        """
        if self.step is not None:
            self.step.lease.release()
            self.step.discard_calls(self.groups)
        self.run.has_begun = True
        self.restarts.begin_step(self.progress.phase, number)
        for group in self.groups.values():
            group.seed = step_seed(self.config.seed, self.progress.phase, number)
        self.performance.reset()
        self.engine_access.load.pop_idle_share()
        progress = replace(self.progress, step=number)
        self.step = StepContext(number, progress, lease=self.store.lease(f"step {number} of {progress.phase}"))
        return self.step

    @cached_property
    def checkpoints(self) -> CheckpointWriter:
        """Return the writer of the session's checkpoints."""
        keep, timeout_s = self.config.checkpoint.keep, self.config.placement.call_timeout_s
        return CheckpointWriter(keep=keep, timeout_s=timeout_s, check=self.run.check_lock)

    def save(self, *, in_background: bool = False) -> None:
        """Write a checkpoint of weights, optimizer and progress; delete older ones.

        With `in_background`, return once the state is copied; the checkpoint is committed later.

        Raises:
            CheckpointError: this checkpoint, or the previous one, if it was in flight, could not be written.
        """
        root = self.run.run_dir / "checkpoints" / self.progress.phase
        write = self.checkpoints.start if in_background else self.checkpoints.save
        with self.run.timer("checkpoint"), span("checkpoint"):
            state = {
                "progress": asdict(self.progress),
                "config": without_secrets(self.config.model_dump(mode="json")),
                "prompts": self.prompts.fingerprint,
                "held_out": self.held_out.fingerprint,
                "reference": self.reference_hashes,
                "records": record_hashes(self.run.run_dir),
                "evaluation_is_due": self.evaluations.is_due or self.evaluations.is_under_way,
            }
            write(root, self.progress.step, self.trained, state, None if self.ahead is None else self.ahead.save)

    def restore(self, checkpoint: LoadedCheckpoint, *, evaluation_is_due: bool) -> None:
        """Load weights and optimizers from a checkpoint; the recipe's queue reads the batches in it."""
        self.restored, self.evaluations.is_due = checkpoint.path, evaluation_is_due
        for name, group in self.trained.items():
            group.run(Trainable.load, str(checkpoint.path / name))
        self.run.note(resumed_note(self.progress, self.config.trainer.steps, checkpoint.path))

    @contextmanager
    def publication(self, of: int | None = None) -> Iterator[None]:
        """Pause generation for a block that publishes weights, in generation `of` if given; rows continue after it.

        No engine samples before all of them have passed the canary.
        """
        with ExitStack() as stack:
            with self.store.waiting():
                stack.enter_context(self.engine_access.publication(of))
            with engine_restarts.interrupted(self.rollout, self.config):
                yield
                num_starts = self.rollout.ranks.num_starts  # engines of later starts have no weights
            self.engine_access.record_replacement(num_starts)

    def replace_engines(self) -> float:
        """Start a new engine for each that failed, with the weights that were published last; return the canary's gap.

        Call it within a `publication`.

        Raises:
            RoleError: a rank raised, died or missed its deadline, or an engine failed the canary.
        """
        engine_restarts.replace_failed_engines(self.rollout, self.engine_access)
        return self.rollout_weights.publish_again(canary_tokens(len(self.tokenizer)))

    def renew_engines(self, generation: int | None, none_is_left: bool) -> bool:
        """Replace the engines that failed, for a generation or (None) for all; return whether that was possible now.

        Other threads leave it to the main thread, whose actor may have other weights; with drain and kept weights, only
        while an engine is left.

        Raises:
            RoleError: see `replace_engines`; or none is left, and the weights of the generation are gone.
        """
        if threading.current_thread() is not self.thread:
            is_in_flight = self.config.rollout.publish == "in_flight"
            if none_is_left and is_in_flight:
                self.evaluations.lose_engines(self.engine_access)
            elif none_is_left and not self.rollout_weights.keeps:
                raise engine_restarts.weights_are_gone()
            if is_in_flight or not none_is_left:
                return False
        with self.publication(generation):
            self.replace_engines()
        return True

    def stop_if_interrupted(self) -> None:
        """End the run after a Ctrl-C; called where no work would be lost.

        Raises:
            Interrupted: Ctrl-C was pressed.
        """
        if self.run.interrupted:
            self.checkpoints.finish()  # Ctrl-C may have come while a step's state was copied
            raise Interrupted

    def _commit(self, step: StepContext, elapsed_s: float, total: int) -> None:
        """Replace the session's progress with the step's, and log the step's metrics."""
        self.finish_evaluation()
        step.metrics |= self.performance.metrics(step, elapsed_s)
        if (idle := self.engine_access.load.pop_idle_share()) is not None:
            step.metrics["perf/engine_idle_share"] = idle
        if self.config.trainer.lead:
            step.metrics["perf/trainer_idle_share"] = step.trainer_idle_share(elapsed_s)
        self.progress = step.progress
        self.evaluations.is_due = step.number % self.config.evaluation.every == 0 or step.number == total
        if step.plan is not None:
            self.run.record_plan(step.plan, step.responses)
        self._log(step, self.progress.phase)
        self.gradients.check(step)
        if self.ahead is not None:
            self.ahead.raise_failure()

    def _complete_step(self, total: int, evaluate: Evaluate | None) -> None:
        """Write a checkpoint and evaluate, if due after the step that was committed last.

        The checkpoint comes first, and says that the evaluation is due: no step is lost if the evaluation fails.
        """
        self.evaluations.is_due &= evaluate is not None
        is_saved = self._save_if_due(self.progress.step == total)
        self.completed = self._place
        self._evaluate(total, evaluate)
        if self.run.interrupted:  # since then; asked once, so that a signal that comes now is left to the next step
            if not is_saved:
                self._save_if_due(is_last=False)
            self.stop_if_interrupted()

    def _save_if_due(self, is_last: bool) -> bool:
        """Write a checkpoint if one is due, after the last step, or after Ctrl-C; advance the one in flight.

        Return whether one was written: synchronously after the last step and after Ctrl-C, which then ends the run.
        """
        with self.run.timer("checkpoint"):
            self.checkpoints.advance()
        if is_saved := is_last or self.run.interrupted:
            self.finish_evaluation()
            self.save()
        elif is_saved := self.progress.step % self.config.checkpoint.every == 0:
            self.save(in_background=self.config.checkpoint.asynchronous)
        if is_saved:
            self.stop_if_interrupted()
        return is_saved

    def _log(self, step: StepContext, phase: Literal["sft_warmup", "train", "evaluation"]) -> None:
        step.metrics |= self.restarts.pop_metrics() | self.engine_access.pop_metrics()
        step.metrics["store/peak_bytes"] = self.store.pop_peak_bytes()
        if step.samples:
            self.run.log_samples(step.samples)
        self.run.log(self.progress.step, step.metrics | step.timer.as_metrics(), phase=phase)

    @property
    def _place(self) -> Place:
        """Return the phase and step that were committed last."""
        return self.progress.phase, self.progress.step

    def _continue_steps(self, total: int, evaluate: Evaluate | None) -> None:
        """Do what is due after the last step, unless that is done."""
        if self.step is None and self.progress.step:  # resumed: a checkpoint says whether its evaluation is due
            self.completed = self._place
        if self.progress.step and self.completed != self._place:
            self._complete_step(total, evaluate)
        else:
            self._evaluate(total, evaluate)
        self.stop_if_interrupted()

    def _evaluates_ahead(self, total: int, evaluate: Evaluate | None) -> bool:
        """Return whether the evaluation after the last step is due and may run while the next step trains."""
        is_between_steps = 0 < self.progress.step < total and not self.run.interrupted
        is_possible = self.config.trainer.lead > 0 and isinstance(evaluate, EnginesOnly) and is_between_steps
        return self.evaluations.is_due and is_possible and self.ahead is not None and self.ahead.holds_evaluation()

    def _evaluate(self, total: int, evaluate: Evaluate | None) -> None:
        """Evaluate the policy after the last step if that is due; with a lead, while the next step trains."""
        self.evaluations.is_due &= evaluate is not None
        if evaluate is None or not self.evaluations.is_due:
            return
        number = self.progress.step
        if self._evaluates_ahead(total, evaluate):
            context = StepContext(number, self.progress, self.store.lease(f"the evaluation after step {number}"))
            session = copy.copy(self)  # whose progress, and seeds of plans, remain those of the last step
            session.groups = with_seed(self.groups, step_seed(self.config.seed, *self._place))
            self.evaluations.begin(self._place, context, partial(evaluate, session, context))
            return
        step = self.begin_step(number)
        with step.lease, step.timer("evaluate"):
            evaluate(self, step)
        self._log(step, "evaluation")
        self.evaluations.is_due = False

    def finish_evaluation(self) -> None:
        """Wait for the evaluation under way, if any, and log it.

        Raises:
            RoleError: it failed.
        """
        taken = (self.step or self).progress.optimizer_steps
        step = self.evaluations.finish(self.engine_access, taken, partial(self.renew_engines, None, True))
        if step is not None:
            self._log(step, "evaluation")
