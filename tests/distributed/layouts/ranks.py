"""What each rank of a layout runs, and returns from the first one."""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.roles import role_batching
from rlpack.config.schema import Config
from rlpack.config.sections.optimization import Lora
from rlpack.distributed.context import RankContext
from rlpack.models import cpu_products
from rlpack.models.check_split import check_split, score_whole_rows
from rlpack.models.context_parallel import RowSplit
from rlpack.models.errors import ModelError
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from rlpack.packing import Batching, make_plan
from rlpack.recipes.driver.loss_weights import step_weights
from rlpack.workers import build
from rlpack.workers.actor import ActorWorker
from rlpack.workers.critic import CriticWorker
from rlpack.workers.loss import Loss, SFTLoss, ValueLoss
from rlpack.workers.reward_model import RewardModelWorker
from tests.builders import exported_weights, tiny_tokenizer
from tests.distributed.actors import policy_loss
from tests.distributed.definition import counts_of
from tests.distributed.layouts.cases import (
    CHECKPOINTING,
    CRITIC,
    RATE,
    SIZES,
    TEMPERATURE,
    Case,
    config_of,
    in_mode,
    layout_of,
)
from tests.distributed.layouts.truth import batch_with_values, new_head
from tests.unit.models.tiny import VOCABULARY, tiny_model

# Roles whose model is sharded layer by layer; those of the others as a whole.
_BY_LAYER = ("actor", "critic")

ADAPTERS = Lora(rank=3, alpha=6.0)

Found = tuple[np.ndarray, list[dict[str, float]], dict[str, np.ndarray]]


def run_cases(
    mesh: Any, rank: int, layout: str, cases: list[tuple[Case, BatchedDataDict]], classifiers: dict[str, str]
) -> list[Found]:
    """Return each case's scores, metrics and gradients, on rank 0; arrays, because tensors would each be a file."""
    context = RankContext("main", rank, layout_of(layout))
    found = []
    for case, batch in cases:
        # Models as small as these would all be sharded as a whole.
        build.shard_model = partial(shard_model, small_bytes=0) if case.role in _BY_LAYER else shard_model
        checkpointing, folder = CHECKPOINTING.get(case.role, "none"), classifiers[case.family]
        config = config_of(case.family, layout=layout, classifier=folder, checkpointing=checkpointing)
        config = in_mode(config, case.mode)
        run = {"actor": _actor, "sft": _actor, "critic": _critic, "reward_model": _reward_model}[case.role]
        scores, metrics, gradients = run(context, config, case, batch)
        found.append((scores, metrics, gradients if rank == 0 else {}))
    return found if rank == 0 else []


def score_on_unlike_cpus(mesh: Any, rank: int, layout: str, batch: BatchedDataDict) -> np.ndarray:
    """Return the actor's log-probs, with numbers of rows that only rank 1's CPU needs to be rounded up."""
    cpu_products.is_faster = lambda: rank == 1
    config = config_of("llama", layout=layout)
    config = config.model_copy(update={"batching": Batching(mode="packed", max_tokens=160, min_microbatches=2)})
    context = RankContext("main", rank, layout_of(layout))
    actor = ActorWorker.from_settings(context, config, tiny_tokenizer())
    sent = batch.keep(["input_ids", "response_mask"])
    return _rows(actor.logprobs, context, config, sent, temperature=TEMPERATURE)["logprobs"].values.numpy()


def _actor(context: RankContext, config: Config, case: Case, batch: BatchedDataDict) -> Found:
    actor = ActorWorker.from_settings(context, config, tiny_tokenizer())
    policy = actor._scorer.policy
    actor._stepper._optimizer = torch.optim.SGD(policy.parameters(), lr=RATE)
    loss, temperature = (SFTLoss(), 1.0) if case.role == "sft" else (policy_loss(config), None)
    sent = batch.keep(["input_ids", "response_mask"])
    scores = _rows(actor.logprobs, context, config, sent, temperature=temperature)["logprobs"].values
    (metrics,) = _step(actor.train_step, context, config, batch, loss)
    metrics = {name: value for name, value in metrics.items() if "/moe_" not in name}  # see test_routing.py
    return scores.numpy(), [metrics], _gradients(policy, "model.")


def _critic(context: RankContext, config: Config, case: Case, batch: BatchedDataDict) -> Found:
    critic = CriticWorker.from_settings(context, config, tiny_tokenizer())
    if critic._critic.has_outputs:
        _set_head(critic._critic.head.weight)
    critic._stepper._optimizer = torch.optim.SGD(critic._critic.parameters(), lr=RATE)
    values = _rows(critic.values, context, config, batch.keep(["input_ids", "response_mask"]))["values"].values
    metrics = _step(critic.train_step, context, config, batch, ValueLoss(CRITIC.value_clip))
    return values.numpy(), metrics, _gradients(critic._critic, "")


def _reward_model(context: RankContext, config: Config, case: Case, batch: BatchedDataDict) -> Found:
    rewards = RewardModelWorker.from_settings(context, config, tiny_tokenizer())
    rows = _rows(rewards.score, context, config, batch.keep(["input_ids", "response_mask"]))
    return rows["rewards"].numpy(), [], {}


def _rows(method: Any, context: RankContext, config: Config, batch: BatchedDataDict, **options: Any) -> BatchedDataDict:
    """Call a method on this rank's shard, and restore the output ranks' rows, as a worker group does."""
    plan = _plan(context, config, batch)
    every: list[Any] = [None] * context.num_ranks
    dist.all_gather_object(every, method(batch.shard(plan)[context.dp_rank], **options))
    return batch.restore([every[rank] for rank in context.layout.output_ranks], plan=plan)


def _step(
    method: Any, context: RankContext, config: Config, batch: BatchedDataDict, loss: Loss, rate: float = RATE
) -> list[dict[str, float]]:
    """Take one optimizer step on the whole batch; return the output ranks' metrics, merged."""
    plan = _plan(context, config, batch)
    weighted = batch.union(step_weights(counts_of(batch), plan, config.algorithm))
    every: list[Any] = [None] * context.num_ranks
    dist.all_gather_object(every, method(weighted.shard(plan)[context.dp_rank], loss, rate))
    return merge_steps([every[rank] for rank in context.layout.output_ranks])


def _plan(context: RankContext, config: Config, batch: BatchedDataDict) -> Any:
    lengths, batching = batch["input_ids"].lengths.numpy(), role_batching(config, "actor")
    prompts = np.array([length for length, _ in SIZES]) if batching.share_prompts else None
    # Of few rows, plans of runs would split the groups to balance the ranks, and share nothing.
    plan = make_plan(
        lengths, context.layout.align(batching), dp_size=context.layout.dp_size, groups=prompts, prefixes=prompts
    )
    assert prompts is None or np.count_nonzero(plan.shared) == 4
    return plan


def _set_head(weight: Tensor) -> None:
    whole = new_head()
    if isinstance(weight, DTensor):
        whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
    with torch.no_grad():
        weight.copy_(whole)


def _gradients(model: PackedModel, prefix: str) -> dict[str, np.ndarray]:
    """Return all gradients by the names of the weights without the prefix; a collective."""
    named = ((name.removeprefix(prefix), parameter.grad) for name, parameter in model.named_parameters())
    return _of_stages(model, {name: _whole(grad).numpy().copy() for name, grad in named if grad is not None})


def _of_stages(model: PackedModel, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of all pipeline stages; those of tied weights are equal."""
    arrays: dict[str, np.ndarray] = {}
    for part in [own] if model.stage is None else model.stage.gather(own):
        for name, array in part.items():
            assert np.array_equal(arrays.setdefault(name, array), array), name
    return arrays


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def start_checked(
    mesh: Any,
    rank: int,
    layout: str,
    family: str,
    precision: Literal["fp32", "bf16"],
    roles: tuple[str, ...] = ("actor",),
    classifier: str | None = None,
) -> bool:
    """Build the workers of some roles with all checks of a start."""
    config = in_mode(config_of(family, layout=layout, classifier=classifier), "packed")
    actor = config.actor.model_copy(update={"precision": precision, "isolation_check": True})
    context = RankContext("main", rank, layout_of(layout))
    for role in roles:
        worker = {"actor": ActorWorker, "critic": CriticWorker, "reward_model": RewardModelWorker}[role]
        worker.from_settings(context, config.model_copy(update={"actor": actor}), tiny_tokenizer())
    return True


class MixingNorm(nn.Module):
    """A norm that also reads the rank's last token, as no check without context parallelism could see."""

    def __init__(self, norm: nn.Module, policy: Policy) -> None:
        super().__init__()
        self.norm, self.policy = norm, [policy]

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.norm(hidden)
        return mixed if self.policy[0].split is None else mixed + 0.1 * mixed[:, -1:]


def mix_tokens(mesh: Any, rank: int, layout: str) -> str:
    """Return the error of a model with a layer other than attention that reads several tokens."""
    policy = Policy(tiny_model("llama", dtype=torch.float32))
    policy.model.model.norm = MixingNorm(policy.model.model.norm, policy)
    whole = score_whole_rows(policy, "cpu", VOCABULARY)
    policy.split = RowSplit.of_group(layout_of(layout).device_mesh("cpu")["cp"].get_group())
    try:
        check_split(policy, whole, "cpu", VOCABULARY, role="actor")
    except ModelError as error:
        return str(error)
    return ""


Saved = dict[str, dict[str, np.ndarray]]


def save(mesh: Any, rank: int, layout: str, family: str, roles: tuple[str, ...], folder: Path) -> Saved:
    """Take two steps of each role with AdamW, and save; return the roles' whole states from rank 0."""
    context, batch, states = RankContext("main", rank, layout_of(layout)), batch_with_values(family), {}
    for role in roles:
        config, worker, loss = _trained_role(context, family, layout, role)
        for _ in range(2):  # in the first one, adapters' matrices A have no gradient
            _step(worker.train_step, context, config, batch, loss)
        (folder / role).mkdir(parents=True, exist_ok=True)
        worker.save(str(folder / role))
        states[role] = _state(worker)
    return states if rank == 0 else {}


def load_and_save(
    mesh: Any, rank: int, layout: str, family: str, roles: tuple[str, ...], folders: tuple[Path, Path]
) -> Saved:
    """Load what another layout saved, and save it again; return the roles' whole states from rank 0."""
    context, states = RankContext("main", rank, layout_of(layout)), {}
    for role in roles:
        _, worker, _ = _trained_role(context, family, layout, role, other_seed=1)
        worker.load(str(folders[0] / role))
        (folders[1] / role).mkdir(parents=True, exist_ok=True)
        worker.save(str(folders[1] / role))
        states[role] = _state(worker)
    return states if rank == 0 else {}


def _trained_role(
    context: RankContext, family: str, layout: str, role: str, *, other_seed: int = 0
) -> tuple[Config, ActorWorker | CriticWorker, Loss]:
    """Return an actor (`adapters`: with adapters) or a critic, its configuration and its loss."""
    config = in_mode(config_of(family, layout=layout), "packed")
    config = config.model_copy(update={"seed": config.seed + other_seed})
    if role == "adapters":
        config = config.model_copy(update={"actor": config.actor.model_copy(update={"lora": ADAPTERS})})
    if role == "critic":
        return config, CriticWorker.from_settings(context, config, tiny_tokenizer()), ValueLoss(CRITIC.value_clip)
    return config, ActorWorker.from_settings(context, config, tiny_tokenizer()), policy_loss(config)


def _state(worker: ActorWorker | CriticWorker) -> dict[str, np.ndarray]:
    """Return all weights and moments of AdamW by name; a collective."""
    optimizer, model, state = worker._stepper._optimizer, worker._stepper.model, {}
    for name, weight in model.named_parameters():
        state[name] = _whole(weight).numpy().copy()
        state |= {f"{name}/{key}": _whole(value).numpy().copy() for key, value in optimizer.state[weight].items()}
    return _of_stages(model, state)


def export(mesh: Any, rank: int, layout: str, family: str, folder: Path) -> dict[str, np.ndarray]:
    """Take a step, write the model's folder, and return the weights as engines receive them."""
    context, config = RankContext("main", rank, layout_of(layout)), config_of(family, layout=layout)
    actor = ActorWorker.from_settings(context, in_mode(config, "packed"), tiny_tokenizer())
    _step(actor.train_step, context, in_mode(config, "packed"), batch_with_values(family), policy_loss(config))
    actor.export_model(str(folder))
    return {name: weight.numpy().copy() for name, weight in exported_weights(actor).items()}
