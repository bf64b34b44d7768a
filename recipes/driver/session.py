"""What every recipe stands on: the run, the roles, the prompts, and where in the run we are."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlpack.algorithms.metric_reduction import reducer_of
from rlpack.batch.store import LocalStore, Store
from rlpack.checkpoint.commit import new_checkpoint
from rlpack.config.redaction import without_secrets
from rlpack.config.roles import is_builtin, started_roles
from rlpack.config.schema import Config
from rlpack.config.sections.optimization import Optimizer
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import RoleError
from rlpack.distributed.start_roles import start_roles
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.models.flops import sequence_cost
from rlpack.observe.run import Run
from rlpack.packing import MicrobatchPlan, warm_up_jit
from rlpack.recipes.driver.learning_rate import learning_rate
from rlpack.recipes.driver.resume import check_same_prompts, check_same_run, newest_checkpoint, reference_folder
from rlpack.recipes.driver.splits import Split, in_store, load_splits
from rlpack.recipes.preflight.config_checks import check_before_start
from rlpack.worker import Trainable
from rlpack.workers.actor import ActorWorker
from rlpack.workers.critic import CriticWorker
from rlpack.workers.reference import ReferenceWorker
from rlpack.workers.reward import RewardWorker
from rlpack.workers.rollout import RolloutWorker

logger = logging.getLogger(__name__)

Phase = Literal["sft_warmup", "train"]
# Built-in roles that score.
_SCORERS = ("reward", "reward_model")
# What is summed over the parts of an optimizer step is a mean over its tokens or rows, and over several steps too.
_OVER_STEPS = {"sum": np.mean, "max": np.max, "min": np.min}


@dataclass
class Progress:
    """Where a run is; with the seed it fixes everything random that comes.

    Attributes:
        phase: `sft_warmup`, or `train` for the recipe's own steps.
        step: steps of the phase that are done.
        policy_version: optimizer steps that are done, over all phases.
        prompts_seen: prompts that rollouts were drawn for.
        demonstrations_seen: demonstrations that supervised steps took, over all phases.
        kl_coef: the KL coefficient, where it is adapted; None before the first such step.
    """

    phase: Phase = "sft_warmup"
    step: int = 0
    policy_version: int = 0
    prompts_seen: int = 0
    demonstrations_seen: int = 0
    kl_coef: float | None = None

    @property
    def took_recipe_steps(self) -> bool:
        """Whether a step of the recipe's own is done."""
        return self.phase == "train" and self.step > 0


@dataclass
class Session:
    """A run that is under way.

    Attributes:
        config: all of it.
        run: the run's directory, sinks, timers and Ctrl-C.
        tokenizer: of the policy.
        prompts: to train on.
        held_out: to evaluate on.
        groups: the started roles by name.
        store: where tokens and texts of the batches lie.
        progress: steps that are done.
        metrics: figures of the step so far.
        step: the step under way; None before the first.
    """

    config: Config
    run: Run
    tokenizer: PreTrainedTokenizerBase
    prompts: Split
    held_out: Split
    groups: dict[str, WorkerGroup[Any]]
    store: Store = field(default_factory=LocalStore)
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, float] = field(default_factory=dict)
    step: int | None = None

    @property
    def actor(self) -> WorkerGroup[ActorWorker]:
        """Return the trained policy's ranks."""
        return self.groups["actor"]

    @property
    def rollout(self) -> WorkerGroup[RolloutWorker]:
        """Return the ranks that generate."""
        return self.groups["rollout"]

    @property
    def critic(self) -> WorkerGroup[CriticWorker]:
        """Return the critic's ranks."""
        return self.groups["critic"]

    @property
    def reference(self) -> WorkerGroup[ReferenceWorker] | None:
        """Return the frozen policy's ranks, if there is a KL term."""
        return self.groups.get("reference")

    @property
    def scorers(self) -> list[WorkerGroup[RewardWorker]]:
        """Return all roles that score: the reward functions, the model of rewards, and the user's own."""
        return [group for name, group in self.groups.items() if name in _SCORERS or not is_builtin(name)]

    @property
    def trained(self) -> dict[str, WorkerGroup[Any]]:
        """Return all roles that are trained, by name."""
        return {name: group for name, group in self.groups.items() if group.implements(Trainable)}

    @property
    def learning_rate(self) -> float:
        """Return the actor's learning rate in the recipe's step under way."""
        return self._rate(self.config.actor.optimizer)

    @property
    def critic_learning_rate(self) -> float:
        """Return the critic's, likewise."""
        return self._rate(self.config.critic.optimizer)

    @property
    def kl_coef(self) -> float:
        """Return the weight of the KL term in the step under way: the configuration's, or what it was adapted to."""
        settings, adapted = self.config.algorithm, self.progress.kl_coef
        return settings.kl_coef if adapted is None or settings.kl_target is None else adapted

    def steps(self, phase: Phase, total: int, evaluate: Callable[["Session"], None] | None = None) -> Iterator[int]:
        """Yield the steps of a phase that are still to do, from 1; between them, all that is not the algorithm.

        After a step its metrics are logged, the policy is evaluated and a checkpoint is written when they are due;
        after Ctrl-C a checkpoint is written and the run ends. A phase that an earlier run finished yields nothing.
        """
        progress = self.progress
        if progress.phase != phase:
            if phase == "sft_warmup":
                return
            progress.phase, progress.step = phase, 0
        self.stop_if_interrupted()
        with self.run.progress(total - progress.step, phase) as bar:
            if evaluate and progress.step == 0:
                self.step = 0
                self._evaluate(evaluate)
                self.stop_if_interrupted()
            for step in range(progress.step + 1, total + 1):
                self.step = step
                began = time.perf_counter()
                with self.run.timer("step"), self.store.step():
                    yield step
                if "packing/real_tokens" in self.metrics:  # the recipe reported a plan
                    tokens = self.metrics["packing/real_tokens"]
                    self.metrics["throughput/tokens_per_s"] = tokens / (time.perf_counter() - began)
                self.metrics["store/peak_bytes"] = self.store.pop_peak_bytes()
                progress.step = step
                self._log(phase)
                bar.advance()
                if evaluate and (step % self.config.evaluation.every == 0 or step == total):
                    self._evaluate(evaluate)
                self._save_if_due(step == total)

    def took_steps(self, metrics: list[dict[str, float]]) -> None:
        """Count optimizer steps and take over their figures: the mean over the steps, the extreme, or the count.

        Skipped steps left the policy as it was and make no version of it; nor do the critic's.
        """
        taken = [1.0 - step["actor/skipped_steps"] for step in metrics if "actor/skipped_steps" in step]
        self.progress.policy_version += round(sum(taken))
        self.metrics["policy_version"] = self.progress.policy_version
        for name in dict.fromkeys(name for step in metrics for name in step):
            values = [step[name] for step in metrics if name in step]
            merge = np.sum if name.endswith("/skipped_steps") else _OVER_STEPS[reducer_of(name)]
            shown = name.replace("actor/", "sft_warmup/") if self.progress.phase == "sft_warmup" else name
            self.metrics[shown] = float(merge(values))

    def report_plan(self, plan: MicrobatchPlan, *, keep: bool = False) -> None:
        """Take over the figures of a plan of the actor, and keep it for the packing picture."""
        self.metrics |= {f"packing/{name}": value for name, value in plan.metrics.as_dict().items()}
        if keep:
            self.run.keep_plan(plan)

    def save(self) -> None:
        """Write and commit a checkpoint of weights, optimizer and progress; older ones go."""
        root = self.run.directory / "checkpoints" / self.progress.phase
        with self.run.timer("checkpoint"), new_checkpoint(root, self.progress.step) as staging:
            for name, group in self.trained.items():
                group.run(Trainable.save, str(staging.path / name))
            state = {
                "progress": asdict(self.progress),
                "config": without_secrets(self.config.model_dump(mode="json")),
                "prompts": self.prompts.fingerprint,
                "held_out": self.held_out.fingerprint,
            }
            staging.commit(state, keep=self.config.checkpoint.keep)

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder, tokenizer included."""
        folder = self.run.directory / "model"
        self.actor.run(ActorWorker.export_model, str(folder))
        self.tokenizer.save_pretrained(folder)
        self.run.note(f"model written to {folder}")

    def stop_if_interrupted(self) -> None:
        """End the run after a Ctrl-C, wherever nothing is lost by it.

        Raises:
            KeyboardInterrupt: there was one.
        """
        if self.run.interrupted:
            raise KeyboardInterrupt

    def _rate(self, settings: Optimizer) -> float:
        assert self.step is not None, "a learning rate belongs to a step"
        return learning_rate(settings, self.step, self.config.trainer.steps)

    def _save_if_due(self, is_last: bool) -> None:
        """Write a checkpoint every so often, at the end of a phase, and before a Ctrl-C ends the run."""
        if self.progress.step % self.config.checkpoint.every == 0 or is_last or self.run.interrupted:
            self.save()
        self.stop_if_interrupted()

    def _log(self, phase: Literal["sft_warmup", "train", "evaluation"]) -> None:
        self.run.log(self.progress.step, self.metrics, phase=phase)
        self.metrics.clear()

    def _evaluate(self, evaluate: Callable[["Session"], None]) -> None:
        with self.run.timer("evaluate"), self.store.step():
            evaluate(self)
        self.metrics["store/peak_bytes"] = self.store.pop_peak_bytes()
        self._log("evaluation")


@contextmanager
def open_session(config: Config) -> Iterator[Session]:
    """Start everything a recipe needs, and end all of it on the way out, whatever happened.

    Data and tokenizer are read, what roles are made of is checked, and a run directory that is taken is refused,
    before any process starts.

    Raises:
        RoleError: a call failed; it carries the step.
    """
    directory = Path(cast(str, config.run_dir))
    resumed = newest_checkpoint(directory) if config.resume == "auto" else None
    progress = Progress(**resumed.state["progress"]) if resumed else Progress()
    if resumed is not None:
        has_reference = not progress.took_recipe_steps or reference_folder(directory).exists()
        check_same_run(resumed.state["config"], config, has_reference=has_reference)
    tokenizer, prompts, held_out = load_splits(config)
    if resumed is not None:
        check_same_prompts(resumed, config, prompts, held_out)
    cost = sequence_cost(check_before_start(config, tokenizer, prompts, held_out))
    threading.Thread(target=warm_up_jit, daemon=True).start()  # while the roles start, which takes longer
    run = Run.start(config, directory, resume_at=progress if resumed else None)
    with run, Cluster(config.placement, config.job) as cluster:
        names = started_roles(config)
        run.note(f"starting the roles {', '.join(names)}")
        groups = start_roles(cluster, config, names, (config, tokenizer), cost=cost)
        train, test = in_store(cluster.store, tokenizer, prompts, held_out)
        session = Session(config, run, tokenizer, train, test, groups, cluster.store, progress)
        session.stop_if_interrupted()
        if resumed is not None:
            for name, group in session.trained.items():
                group.run(Trainable.load, str(resumed.path / name))
            run.note(f"resumed after step {progress.step} of {progress.phase} from {resumed.path}")
        try:
            yield session
        except RoleError as error:
            error.phase, error.step = progress.phase, session.step
            raise
        session.stop_if_interrupted()
        session.export()
