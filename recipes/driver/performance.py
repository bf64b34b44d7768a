"""Rates of a run's phases: FLOPs per second of the ranks' time, and as a fraction of their devices' peak.

Stages count the FLOPs of the calls that they make, from the plan and the model's shape; ranks measure the time of each
call. A phase is a method of a role that runs its model. FLOPs and time belong to the step in which any thread waited
for the call's result: with `trainer.lead`, the scores of a later batch count for the step in progress.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Self

from torch import Tensor
from transformers import PreTrainedModel

from rlpack.config.roles import gpus_per_rank, role_compute, started_roles
from rlpack.config.schema import Config, Model
from rlpack.distributed.calls import Pending
from rlpack.distributed.usage import merged
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.models.device_peak import device_peak
from rlpack.models.flops import ModelFlops, model_flops
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.loading import build_meta_classifier, build_meta_model, load_config
from rlpack.models.optimizers import freeze
from rlpack.models.packed import language_model
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.build import set_trained_weights

# Names of phases in metrics, by method.
_PHASES = {"train_step": "update", "logprobs": "logprobs", "values": "values", "score": "scores"}


class WorkLog:
    """FLOPs since the last request, by role and method; threads may share it."""

    def __init__(self) -> None:
        """Start with no FLOPs."""
        self._flops: dict[tuple[str, str], float] = {}
        self._lock = Lock()

    def add(self, role: str, method: str, flops: float) -> None:
        """Add the FLOPs of a call."""
        with self._lock:
            self._flops[role, method] = self._flops.get((role, method), 0.0) + flops

    def pop(self) -> dict[tuple[str, str], float]:
        """Return the FLOPs, and forget them."""
        with self._lock:
            flops, self._flops = self._flops, {}
        return flops


@dataclass(frozen=True)
class PerformanceMeter:
    """The metrics `perf/*` and `throughput/*` of a run's steps.

    Attributes:
        groups: the started roles by name.
        flops: FLOPs of the roles that run a model whose FLOPs are known.
        peaks: FLOP/s of the ranks' devices, by role.
        work: the FLOPs of the step so far.
    """

    groups: Mapping[str, WorkerGroup[Any]] = field(default_factory=dict)
    flops: Mapping[str, ModelFlops] = field(default_factory=dict)
    peaks: Mapping[str, Pending[list[float]]] = field(default_factory=dict)
    work: WorkLog = field(default_factory=WorkLog)

    @classmethod
    def start(cls, config: Config, groups: Mapping[str, WorkerGroup[Any]], model: PreTrainedModel) -> Self:
        """Let the ranks measure their devices' peak while the driver continues.

        Args:
            config: the whole configuration.
            groups: the started roles by name.
            model: the policy on the meta device.
        """
        flops = flops_of_roles(config, model)
        devices = {role: "cuda" if gpus_per_rank(config, role) else "cpu" for role in flops}
        dtypes = {role: role_compute(config, role).precision for role in flops}
        return cls(
            groups, flops, {role: groups[role].ranks.apply(device_peak, devices[role], dtypes[role]) for role in flops}
        )

    def reset(self) -> None:
        """Forget the calls that were made between two steps."""
        for role, group in self.groups.items():
            group.ranks.pop_usage(role)
        self.work.pop()

    def count(self, role: str, method: Callable[..., Any], plan: MicrobatchPlan, scored: Tensor) -> None:
        """Count the FLOPs of a call; those of several calls add up.

        Args:
            role: name of the role.
            method: `train_step`, or a method that runs a forward pass.
            plan: the plan whose tokens are counted, without padding; tokens that rows share count once.
            scored: tokens of each row that the output layer scores, int64 [B].
        """
        if role not in self.flops:
            return
        of_pass = self.flops[role].update if method.__name__ == "train_step" else self.flops[role].forward
        self.work.add(role, method.__name__, of_pass(plan.lengths, int(scored.sum())) - of_pass(plan.shared, 0))

    def metrics(self, step: StepContext, elapsed_s: float) -> dict[str, float]:
        """Return the metrics of a step that took `elapsed_s` seconds."""
        usages = {role: group.ranks.pop_usage(role) for role, group in self.groups.items()}
        peak = merged(usage for methods in usages.values() for usage in methods.values())
        metrics = {"perf/memory_resident": float(peak.resident)} if peak.resident else {}
        if peak.reserved:
            metrics |= {"perf/memory_allocated": float(peak.allocated), "perf/memory_reserved": float(peak.reserved)}
        if "packing/real_tokens" in step.metrics:  # the recipe reported a plan
            metrics["throughput/tokens_per_s"] = step.metrics["packing/real_tokens"] / elapsed_s
        for (role, method), flops in self.work.pop().items():
            usage = usages[role].get(method)
            if usage is None or usage.seconds <= 0:
                continue
            rate = flops / usage.seconds
            phase = f"{role}_{_PHASES[method]}"
            metrics[f"perf/tflops/{phase}"] = rate / self.groups[role].num_ranks / 1e12
            metrics[f"perf/mfu/{phase}"] = rate / sum(self.peaks[role].result())
        return metrics


def flops_of_roles(config: Config, model: PreTrainedModel) -> dict[str, ModelFlops]:
    """Return the FLOPs of the roles that run a model, by role.

    Args:
        config: the whole configuration.
        model: the policy on the meta device.
    """
    names, flops = started_roles(config), {}
    if "actor" in names:
        trained = copy.deepcopy(model)
        set_trained_weights(trained, config.actor, seed=config.seed)
        flops["actor"] = model_flops(trained)
    if "reference" in names:
        flops["reference"] = model_flops(model)
    if "critic" in names:
        path = config.critic.path
        initial = copy.deepcopy(model)
        if path is not None:
            initial = build_meta_model(Model(path=path, revision=config.critic.revision), key="critic.path")
        critic = ScalarHeadModel(language_model(initial))
        freeze(critic.pattern_root, config.critic.optimizer, "critic.optimizer")
        flops["critic"] = replace(model_flops(critic.model), head=0.0)
    if "reward_model" in names:
        path, key = config.reward_model.path, "reward_model.path"
        assert path is not None, "a reward model is started only with a path"
        settings = load_config(Model(path=path, revision=config.reward_model.revision), key=key)
        flops["reward_model"] = replace(model_flops(language_model(build_meta_classifier(settings, path))), head=0.0)
    return flops
