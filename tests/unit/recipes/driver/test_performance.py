"""Rates of phases, from FLOPs that were counted and times that ranks measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlpack.config.schema import Actor
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.config.sections.value_models import RewardModel
from rlpack.distributed.calls import Pending
from rlpack.distributed.usage import Measured, Usage, UsageLog
from rlpack.models.flops import ModelFlops
from rlpack.models.loading import build_meta_model
from rlpack.packing import Batching, Cost, make_plan
from rlpack.recipes.driver.performance import PerformanceMeter, flops_of_roles
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.actor import ActorWorker
from rlpack.workers.reward_model import RewardModelWorker
from tests.builders import tiny_config
from tests.unit.models.torch_flops import flops_of_causal_model

GIB = 2**30


class MeasuredRanks:
    """Two ranks whose calls took what `log` has."""

    num_ranks = 2

    def __init__(self) -> None:
        self.log = UsageLog()
        self.ranks = self

    def pop_usage(self, role: str) -> dict[str, Usage]:
        return self.log.pop(role)


def step() -> StepContext:
    return StepContext(1, Progress(), lease=cast(Any, None))


def meter(group: MeasuredRanks) -> PerformanceMeter:
    flops = {"actor": ModelFlops(Cost(linear=1e9, quadratic=1e6), head=1e8)}
    return PerformanceMeter({"actor": cast(Any, group)}, flops, {"actor": Pending(lambda: [1e12, 3e12])})


def test_rates_are_flops_of_real_tokens_over_the_time_of_the_slowest_rank() -> None:
    group, current = MeasuredRanks(), step()
    plan = make_plan([10, 30], Batching(max_tokens=64, pad_to_multiple=8), dp_size=2)
    scored = torch.tensor([5, 20])
    forward = 40e9 + (100 + 900) * 1e6 + 25e8
    made = meter(group)
    made.count("actor", ActorWorker.logprobs, plan, scored)
    for _ in range(2):
        made.count("actor", ActorWorker.train_step, plan, scored)
    group.log.unwrap("actor", "logprobs", {0: Measured(None, Usage(0.5, GIB)), 1: Measured(None, Usage(1.0, 2 * GIB))})
    for seconds in (1.0, 3.0):
        group.log.unwrap("actor", "train_step", {0: Measured([], Usage(seconds, GIB))})
    assert made.metrics(current, 2.0) == {
        "perf/memory_resident": 2 * GIB,
        "perf/tflops/actor_logprobs": pytest.approx(forward / 1.0 / 2 / 1e12),
        "perf/mfu/actor_logprobs": pytest.approx(forward / 1.0 / 4e12),
        "perf/tflops/actor_update": pytest.approx(2 * 3 * forward / 4.0 / 2 / 1e12),
        "perf/mfu/actor_update": pytest.approx(2 * 3 * forward / 4.0 / 4e12),
    }


def test_calls_between_steps_and_roles_of_unknown_flops_don_t_count() -> None:
    group, current = MeasuredRanks(), step()
    made = meter(group)
    group.log.unwrap("actor", "logprobs", {0: Measured(None, Usage(9.0, GIB))})
    made.reset()
    plan = make_plan([4], Batching(max_tokens=64), dp_size=2)
    made.count("judge", ActorWorker.logprobs, plan, torch.tensor([4]))
    made.count("actor", ActorWorker.logprobs, plan, torch.tensor([4]))
    assert made.metrics(current, 1.0) == {}


def test_gpu_memory_is_reported_where_there_is_a_gpu() -> None:
    group = MeasuredRanks()
    group.log.unwrap("actor", "save", {0: Measured(None, Usage(1.0, GIB, 3 * GIB, 4 * GIB))})
    metrics = meter(group).metrics(step(), 1.0)
    assert (metrics["perf/memory_allocated"], metrics["perf/memory_reserved"]) == (3 * GIB, 4 * GIB)


def test_frozen_weights_count_as_not_trained() -> None:
    def trained(**settings: Any) -> float:
        config = tiny_config(actor=Actor(**settings))
        return flops_of_roles(config, build_meta_model(config.model, vocab_size=53))["actor"].trained

    assert trained() == 1.0
    assert trained(lora=Lora(rank=1)) < trained(optimizer=Optimizer(freeze=("*mlp*",))) < 1.0


def test_a_reward_model_has_the_flops_that_torch_counts_of_its_own_architecture(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    settings = AutoConfig.for_model("llama", **shape, vocab_size=53, num_labels=1, pad_token_id=0)
    settings.save_pretrained(tmp_path)
    config = tiny_config(reward_model=RewardModel(path=str(tmp_path)))
    flops = flops_of_roles(config, build_meta_model(config.model, vocab_size=53))["reward_model"]
    model = AutoModelForSequenceClassification.from_config(settings, attn_implementation="eager")
    ids = torch.arange(16)[None] + 1
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(input_ids=ids, use_cache=False)
    assert flops.forward(np.array([16]), 16) == flops_of_causal_model(counter)


def test_scores_of_a_reward_model_are_a_phase() -> None:
    group, current = MeasuredRanks(), step()
    made = meter(group)
    made = replace(made, groups={"reward_model": made.groups["actor"]}, flops={"reward_model": made.flops["actor"]},
                   peaks={"reward_model": made.peaks["actor"]})  # fmt: skip
    plan = make_plan([10, 30], Batching(max_tokens=64), dp_size=2)
    made.count("reward_model", RewardModelWorker.score, plan, torch.zeros(0))
    group.log.unwrap("reward_model", "score", {0: Measured(None, Usage(2.0))})
    body = 40e9 + (100 + 900) * 1e6
    assert made.metrics(current, 1.0) == {
        "perf/tflops/reward_model_scores": pytest.approx(body / 2.0 / 2 / 1e12),
        "perf/mfu/reward_model_scores": pytest.approx(body / 2.0 / 4e12),
    }
