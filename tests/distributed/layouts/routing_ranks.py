"""What each rank of a layout runs with a mixture of experts, and the truth of it by definition."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config, Model
from rlpack.config.sections.optimization import Experts
from rlpack.distributed.context import RankContext
from rlpack.models.parallel import shard_model
from rlpack.models.parts import local_part
from rlpack.workers import build
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import SFTLoss
from tests.builders import MODEL, tiny_tokenizer
from tests.distributed.actors import policy_loss
from tests.distributed.definition import plain_model, row_scores, scored, step_by_definition
from tests.distributed.layouts import ranks
from tests.distributed.layouts.cases import RATE, SIZES, TEMPERATURE, config_of, in_mode, layout_of

# Sigmoid scores, a choice within groups of experts, shared experts and a dense layer.
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def moe_config(family: str, layout: str, checkpointing: str = "none", **options: Any) -> Config:
    """Return a run on a family's model with settings of `actor.moe`."""
    is_deepseek = family == "deepseek_v3"
    config = config_of("qwen3_moe" if is_deepseek else family, layout=layout, checkpointing=checkpointing)
    if is_deepseek:
        config = config.model_copy(update={"model": Model(config=MODEL | DEEPSEEK)})
    actor = config.actor.model_copy(update={"moe": Experts(**options)})
    return config.model_copy(update={"actor": actor})


def new_actor(rank: int, layout: str, config: Config) -> ActorWorker:
    """Return an actor that takes plain gradient steps."""
    build.shard_model = partial(shard_model, small_bytes=0)
    actor = ActorWorker.from_settings(RankContext("main", rank, layout_of(layout)), config, tiny_tokenizer())
    actor._stepper._optimizer = torch.optim.SGD(actor._scorer.policy.parameters(), lr=RATE)
    return actor


Step = tuple[dict[str, float], dict[str, np.ndarray]]


def supervised_steps(
    mesh: Any, rank: int, layout: str, batch: BatchedDataDict, cases: list[tuple[str, Config]]
) -> list[Step]:
    """Return metrics and gradients of a supervised step in each mode with each configuration, on rank 0."""
    context, found = RankContext("main", rank, layout_of(layout)), []
    for mode, config in cases:
        config = in_mode(config, mode)
        actor = new_actor(rank, layout, config)
        (metrics,) = ranks._step(actor.train_step, context, config, batch, SFTLoss())
        gradients = ranks._gradients(actor._scorer.policy, "model.")
        found.append((metrics, gradients if rank == 0 else {}))
    return found if rank == 0 else []


def scored_batch(config: Config) -> BatchedDataDict:
    """Return a batch of all columns that a policy step reads; no row is quarantined."""
    return scored(SIZES, None, TEMPERATURE, config)


def change_weights(named: Iterable[tuple[str, Tensor]]) -> None:
    """Change weights so that routing changes; entry by entry, so that a rank can change its part."""
    with torch.no_grad():
        for name, weight in named:
            if any(part in name for part in ("o_proj", "q_proj", "experts", ".gate.")):
                local_part(weight).mul_(1.3)


def replayed_steps(
    mesh: Any, rank: int, layout: str, batch: BatchedDataDict, cases: list[tuple[str, Config]]
) -> list[tuple[np.ndarray, Step, Step]]:
    """Return recorded experts, and policy steps that replay them before and after a change of the weights, on rank 0.

    The old log-probs of the first step are the policy's own, those of the second are the batch's.
    """
    context, found = RankContext("main", rank, layout_of(layout)), []
    for mode, config in cases:
        config = in_mode(config, mode)
        actor = new_actor(rank, layout, config)
        policy, loss = actor._scorer.policy, replace(policy_loss(config), replays_routing=True)
        scored = ranks._rows(actor.logprobs, context, config, batch.keep(["input_ids", "response_mask"]))
        batch = batch.drop(["routed_experts"] if "routed_experts" in batch else [])
        batch = batch.union(scored.keep(["routed_experts"]))
        own = batch.drop(["logprobs"]).union(scored.keep(["logprobs"]))
        steps = []
        for rows in (own, batch):
            (metrics,) = ranks._step(actor.train_step, context, config, rows, loss, 0.0)
            steps.append((metrics, ranks._gradients(policy, "model.")))
            change_weights(policy.named_parameters())
        found.append((batch["routed_experts"].values.numpy(), *steps))
    return found if rank == 0 else []


def choices(config: Config, batch: BatchedDataDict) -> Tensor:
    """Return the experts of all tokens by transformers' own model in float64, [T, L, k]."""
    model, chosen = plain_model(config), list[Tensor]()
    for router in routers_of(model):
        router.register_forward_hook(lambda _, __, outputs: chosen.append(outputs[2]))
    rows = []
    for tokens in batch["input_ids"].rows():
        chosen.clear()
        with torch.no_grad():
            model(tokens[None], use_cache=False)
        rows.append(torch.stack(chosen, 1))
    return torch.cat(rows)


def replay_truth(config: Config, batch: BatchedDataDict) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and gradients of the second step with fixed choices, by definition."""
    model, fixed = plain_model(config), choices(config, batch)
    change_weights(model.named_parameters())
    of_row = dict(zip(_keys(batch), batch["input_ids"].with_values(fixed).rows(), strict=True))
    row, changed = list[Tensor](), list[Tensor]()

    def forward(router: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, free = type(router).forward(router, hidden)
        index = row[-1][:, layer]
        changed.append((free.sort(1).values != index.sort(1).values).any(1))
        if config.model.config["model_type"] == "deepseek_v3":
            chosen = logits.sigmoid().gather(1, index)
            return logits, router.routed_scaling_factor * chosen / chosen.sum(1, keepdim=True), index
        chosen = logits.softmax(1).gather(1, index)
        normalizes = config.model.config["model_type"] == "mixtral" or router.norm_topk_prob
        return logits, chosen / chosen.sum(1, keepdim=True) if normalizes else chosen, index

    for layer, router in enumerate(routers_of(model)):
        router.forward = partial(forward, router, layer)
    model.register_forward_pre_hook(lambda _, arguments: row.append(of_row[tuple(arguments[0][0].tolist())]))
    metrics = step_by_definition(model, batch, range(batch.num_rows), config.algorithm, TEMPERATURE, RATE)
    metrics = {name: value for name, value in metrics.items() if "learning_rate" not in name}
    metrics["actor/moe_replay_changed"] = torch.cat(changed).double().mean().item()
    return metrics, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _keys(batch: BatchedDataDict) -> list[tuple[int, ...]]:
    return [tuple(tokens.tolist()) for tokens in batch["input_ids"].rows()]


def routers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that choose experts, in order."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("router")]


def supervised_truth(config: Config, batch: BatchedDataDict) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the metrics and gradients of a supervised step by definition, one row at a time in float64."""
    model = plain_model(config)
    routers = routers_of(model)
    logits: list[Tensor] = []
    chosen: list[Tensor] = []

    def note(router: torch.nn.Module, arguments: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        logits.append(outputs[0])
        chosen.append(outputs[2])

    for router in routers:
        router.register_forward_hook(note)
    masks = [m & valid for m, valid in zip(batch["response_mask"].rows(), batch["valid"], strict=True)]
    total, num_layers = sum(int(mask.sum()) for mask in masks), len(routers)
    loss, balance, load = torch.zeros(()).double(), torch.zeros(()).double(), torch.zeros(num_layers, 0)
    for tokens, mask in zip(batch["input_ids"].rows(), masks, strict=True):
        logits.clear()
        chosen.clear()
        loss = loss - row_scores(model, tokens, 1.0)[0][mask].sum() / total
        assert len(logits) == num_layers
        counts = torch.stack([torch.bincount(index.flatten(), minlength=logits[0].shape[1]) for index in chosen])
        load = counts if not load.numel() else load + counts
        for layer in range(num_layers):
            is_sigmoid = config.model.config["model_type"] == "deepseek_v3"
            scores = logits[layer].sigmoid() if is_sigmoid else logits[layer].softmax(1)
            share = (scores / scores.sum(1, keepdim=True)).mean(0)
            frequency = counts[layer] / counts[layer].sum() * scores.shape[1]
            balance = balance + mask.sum() / total * (frequency * share).sum()
    whole = loss + config.actor.moe.balance_coefficient * balance
    whole.backward()
    ratios = load.amax(1) / load.double().mean(1)
    metrics = {
        "actor/loss": whole.item(),
        "actor/moe_balance_loss": balance.item() / num_layers,
        "actor/moe_load_imbalance": ratios.mean().item(),
        "actor/moe_load_imbalance_max": ratios.max().item(),
    }
    return metrics, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
