"""Functions that each rank of the actor's tests runs, and their results."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.layout_sizes import layout_sizes
from rlpack.config.schema import Config
from rlpack.distributed.context import RankContext
from rlpack.distributed.layout import ParallelLayout
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import PolicyGradientLoss
from tests.builders import exported_weights, tiny_tokenizer


@dataclass(frozen=True)
class Outcome:
    """The state of one rank after its calls.

    Attributes:
        results: return values of the calls, in order.
        gradients: of the last optimizer step, whole, by the names of the weights.
        weights: whole, after it.
    """

    results: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def new_actor(config: Config, rank: int, size: int, *, rate: float | None = None) -> ActorWorker:
    """Return an actor; with a `rate` it takes plain gradient steps.

    AdamW's first step is the gradient's sign, which turns a rounding error in a gradient near zero into a whole step.
    """
    if rate is not None:
        optimizer = config.actor.optimizer.model_copy(update={"learning_rate": rate})
        config = config.model_copy(update={"actor": config.actor.model_copy(update={"optimizer": optimizer})})
    actor = ActorWorker.from_settings(
        RankContext("main", rank, ParallelLayout(**layout_sizes(config, "actor", size))), config, tiny_tokenizer()
    )
    if rate is not None:
        actor._stepper._optimizer = torch.optim.SGD(actor._scorer.policy.parameters(), lr=rate)
    return actor


def policy_loss(config: Config) -> PolicyGradientLoss:
    """Return the loss that the driver passes to `train_step`."""
    return PolicyGradientLoss(config.algorithm, temperature=config.rollout.temperature)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def outcome(actor: ActorWorker, results: list[Any]) -> Outcome:
    named = list(actor._scorer.policy.model.named_parameters())
    gradients = {name: _whole(parameter.grad) for name, parameter in named if parameter.grad is not None}
    return Outcome(results, gradients, {name: _whole(parameter) for name, parameter in named})


def updates(
    mesh: Any, rank: int, cases: list[tuple[Config, list[BatchedDataDict]]], rate: float | None
) -> list[Outcome]:
    """Update a new actor on this rank's shard of each case.

    With a `rate`, cases that differ only in the loss share an actor, and each restores its initial weights: most of the
    time is spent on building models, and plain gradient steps leave no other state.
    """
    found, actor, built, first = [], None, None, []
    for config, shards in cases:
        shared = config.model_copy(update={"algorithm": cases[0][0].algorithm})
        if actor is None or rate is None or shared != built:
            actor, built = new_actor(config, rank, mesh.size(), rate=rate), shared
            first = [parameter.detach().clone() for parameter in actor._scorer.policy.parameters()]
        for parameter, value in zip(actor._scorer.policy.parameters(), first, strict=True):
            parameter.detach().copy_(value)
            parameter.grad = None
        found.append(outcome(actor, [actor.train_step(shards[rank], policy_loss(config))]))
    return found


def gradients(
    mesh: Any, rank: int, cases: list[tuple[Config, list[BatchedDataDict]]], rate: float
) -> list[tuple[list[dict[str, float]], dict[str, np.ndarray]]]:
    """Do as `updates`; return metrics, and gradients as arrays on rank 0.

    Tensors would each take an open file on their way to the test.
    """
    found = []
    for outcome in updates(mesh, rank, cases, rate):
        arrays = {name: gradient.numpy() for name, gradient in outcome.gradients.items()} if rank == 0 else {}
        found.append((outcome.results[0], arrays))
    return found


def corrections(mesh: Any, rank: int, cases: list[tuple[Config, list[BatchedDataDict]]]) -> list[BatchedDataDict]:
    """Correct this rank's shard of each case with a new actor, by the case's `algorithm.correction`."""
    return [
        new_actor(config, rank, mesh.size()).correct(shards[rank], config.algorithm.correction)
        for config, shards in cases
    ]


def logprobs(mesh: Any, rank: int, config: Config, shards: list[BatchedDataDict]) -> BatchedDataDict:
    """Score this rank's shard with a new actor."""
    return new_actor(config, rank, mesh.size()).logprobs(shards[rank])


def save_and_go_on(mesh: Any, rank: int, config: Config, shards: list[BatchedDataDict], folder: Path) -> list[Outcome]:
    """Take a step, save, and take another; return the state at the save and after."""
    actor = new_actor(config, rank, mesh.size())
    actor.train_step(shards[rank], policy_loss(config))
    actor.save(str(folder))
    saved = outcome(actor, [])
    return [saved, outcome(actor, [actor.train_step(shards[rank], policy_loss(config))])]


def load_and_go_on(
    mesh: Any, rank: int, config: Config, shards: list[BatchedDataDict], folder: Path, reseed: bool = True
) -> list[Outcome]:
    """Load into an actor with other weights, and take a step; return the state after loading and after the step.

    The other weights are those of another seed, or of a step that the checkpoint knows nothing of.
    """
    seed = config.seed + 1 if reseed else config.seed
    actor = new_actor(config.model_copy(update={"seed": seed}), rank, mesh.size())
    if not reseed:
        actor.train_step(shards[rank], policy_loss(config))
        actor.train_step(shards[rank], policy_loss(config))
    actor.load(str(folder))
    loaded = outcome(actor, [])
    return [loaded, outcome(actor, [actor.train_step(shards[rank], policy_loss(config))])]


def export(mesh: Any, rank: int, config: Config, shards: list[BatchedDataDict], folder: Path) -> dict[str, Tensor]:
    """Take a step, write the model's folder and export the weights, take another step and export again.

    The first export is returned by the weights' names, and the second with `after/` before them.
    """
    actor = new_actor(config, rank, mesh.size())
    actor.train_step(shards[rank], policy_loss(config))
    actor.export_model(str(folder))
    before = exported_weights(actor)
    actor.train_step(shards[rank], policy_loss(config))
    return before | {f"after/{name}": weight for name, weight in exported_weights(actor).items()}
