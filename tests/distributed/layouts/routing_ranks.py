"""What each rank of a layout runs with a mixture of experts, and the truth of it by definition."""

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
from rlpack.workers import build
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import SFTLoss
from tests.builders import MODEL, tiny_tokenizer
from tests.distributed.definition import plain_model, row_scores
from tests.distributed.layouts import ranks
from tests.distributed.layouts.cases import RATE, config_of, in_mode, layout_of

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


def supervised_truth(config: Config, batch: BatchedDataDict) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the metrics and gradients of a supervised step by definition, one row at a time in float64."""
    model = plain_model(config)
    routers = [module for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
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
