"""Functions that each rank of the critic's tests runs, with roles in different batching modes."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm, Config, Reference, Rollout
from rlpack.config.sections.role_batching import RoleBatching
from rlpack.config.sections.value_models import Critic, RewardModel
from rlpack.distributed.context import RankContext
from rlpack.distributed.layout import ParallelLayout
from rlpack.models.heads import ScalarHeadModel
from rlpack.packing import Batching, make_plan
from rlpack.recipes.driver.loss_weights import step_weights
from rlpack.workers.actor import ActorWorker
from rlpack.workers.critic import CriticWorker
from rlpack.workers.loss import ValueLoss
from rlpack.workers.optimizer_step import OptimizerStepper
from rlpack.workers.reference import ReferenceWorker
from rlpack.workers.reward_model import RewardModelWorker
from tests.builders import tiny_config, tiny_tokenizer

MODES = {
    "packed": RoleBatching(mode="packed", max_tokens=32),
    "dynamic": RoleBatching(mode="dynamic", max_tokens=48),
    "fixed": RoleBatching(mode="fixed", micro_batch_size=3),
}
KL_COEF, TEMPERATURE = 0.3, 0.8
SETTINGS = Critic(gamma=0.97, gae_lambda=0.9, value_clip=0.1)


def new_head(width: int) -> Tensor:
    """Return nonzero weights of a value head."""
    return torch.randn(1, width, generator=torch.Generator().manual_seed(11)) / width**0.5


def _set_head(critic: ScalarHeadModel) -> None:
    weight = critic.head.weight
    whole = new_head(weight.shape[1])
    if isinstance(weight, DTensor):
        whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
    with torch.no_grad():
        weight.copy_(whole)


def config_of(mode: str, classifier: str) -> Config:
    """Return a run whose critic, reference and reward model batch in one mode."""
    batching = MODES[mode]
    return tiny_config(
        recipe="ppo",
        algorithm=Algorithm(kl_coef=KL_COEF, kl_placement="reward", kl_estimator="k3"),
        rollout=Rollout(temperature=TEMPERATURE),
        critic=SETTINGS.model_copy(update={"batching": batching}),
        reference=Reference(batching=batching),
        reward_model=RewardModel(path=classifier, weight=2.0, batching=batching),
    )


def _run(method: Any, batch: BatchedDataDict, batching: Batching, *args: Any) -> BatchedDataDict:
    """Call a sharded method on every rank's shard, and restore the order, as a worker group does."""
    plan = make_plan(batch["input_ids"].lengths.numpy(), batching, dp_size=dist.get_world_size(), mini_batch_size=4)
    own = method(batch.shard(plan)[dist.get_rank()], *args)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return batch.restore(every, plan=plan)


def all_combinations(
    mesh: Any, rank: int, batch: BatchedDataDict, classifier: str
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return advantages and returns for every combination of the modes of critic, reference and reward model."""
    context = RankContext("main", rank, ParallelLayout(dp_shard=mesh.size()))
    columns: dict[tuple[str, str], BatchedDataDict] = {}
    critics: dict[str, tuple[CriticWorker, Batching]] = {}
    for mode in MODES:
        config = config_of(mode, classifier)
        batching = config.batching.override(**MODES[mode].model_dump())
        critic, reference, rewards = (
            kind.from_settings(context, config, tiny_tokenizer())
            for kind in (CriticWorker, ReferenceWorker, RewardModelWorker)
        )
        _set_head(critic._critic)
        critics[mode] = critic, batching
        columns["critic", mode] = _run(critic.values, batch.keep(["input_ids", "response_mask"]), batching)
        sent = batch.keep(["input_ids", "response_mask", "logprobs"])
        scored = _run(reference.logprobs, sent, batching)
        sums = _run(ActorWorker.__new__(ActorWorker).kl_sums, sent.union(scored), batching, "k3")  # needs no model
        columns["reference", mode] = scored.union(sums)
        columns["reward", mode] = _run(rewards.score, sent, batching)
    found = {}
    for key in itertools.product(MODES, MODES, MODES):
        parts = [columns[role, mode] for role, mode in zip(("critic", "reference", "reward"), key, strict=True)]
        whole = batch
        for part in parts:
            whole = whole.union(part)
        critic, batching = critics[key[0]]
        made = _run(critic.advantages, whole, batching, KL_COEF)
        found[key] = {name: made[name].values.numpy() for name in ("advantages", "returns")} | {
            "rewards": whole["rewards"].numpy(),
            "kl_sum": whole["kl_sum"].numpy(),
            "values": whole["values"].values.numpy(),
            "sums": {name: made[name].numpy() for name in made if name.endswith(("_sum", "_squares"))},
        }
    return found if rank == 0 else {}


def updates(
    mesh: Any, rank: int, batch: BatchedDataDict, cases: list[tuple[str, int]], rate: float
) -> list[tuple[list[dict[str, float]], dict[str, Any]]]:
    """Update a new critic by plain gradient descent in each mode, with at least the given number of microbatches."""
    found = []
    for mode, microbatches in cases:
        config = config_of(mode, "none")
        critic = CriticWorker.from_settings(
            RankContext("main", rank, ParallelLayout(dp_shard=mesh.size())), config, tiny_tokenizer()
        )
        _set_head(critic._critic)
        critic._stepper = _descent(critic._critic, rate, critic.context)
        batching = config.batching.override(**MODES[mode].model_dump() | {"min_microbatches": microbatches})
        plan = make_plan(batch["input_ids"].lengths.numpy(), batching, dp_size=mesh.size())
        counts = torch.tensor([int(row.sum()) for row in batch["response_mask"].rows()]).where(batch["valid"], 0)
        weights = step_weights(counts, plan, config.algorithm)["token_weight"]
        shard = batch.union({"loss_weight": weights}).shard(plan)[rank]
        metrics = critic.train_step(shard, ValueLoss(SETTINGS.value_clip), rate)
        grads = {name: _whole(p.grad).numpy() for name, p in critic._critic.named_parameters() if p.grad is not None}
        every: list[Any] = [None] * mesh.size()
        dist.all_gather_object(every, metrics)
        found.append((merge_steps(every), grads if rank == 0 else {}))
    return found


def _descent(critic: ScalarHeadModel, rate: float, context: RankContext) -> OptimizerStepper:
    stepper = OptimizerStepper("critic", critic, SETTINGS.optimizer.model_copy(update={"max_grad_norm": 1e9}), context)
    stepper._optimizer = torch.optim.SGD(critic.parameters(), lr=rate)
    return stepper


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
