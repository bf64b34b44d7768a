"""Row `grpo`: whole GRPO steps on one device, with all roles in this process and the time of each phase.

The stages are those of `rlpack.recipes.grpo`, and the roles those of a run; neither Ray nor Hydra is needed. Row
`train` (`benchmarks.gpu.train_command`) runs `rlpack train` as a user does.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console as RichConsole
from transformers import PreTrainedTokenizerBase

from benchmarks.gpu.figures import Figure, Setup, one_rank
from rlpack.batch.store import LocalStore
from rlpack.config.roles import role_batching
from rlpack.config.schema import Checkpoint, Config, Data, Model, Placement, Pool, Rollout, SFTWarmup, Trainer
from rlpack.config.sections.reward_sources import Reward
from rlpack.distributed.context import RankContext
from rlpack.distributed.process import load_class
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.observe.console import Console
from rlpack.observe.run import Run
from rlpack.observe.run_dir import METRICS
from rlpack.recipes.driver.draws import draw_rollouts
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.policy_stages import compute_advantages, compute_old_logprobs, update_actor
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.splits import cache_splits, load_splits
from rlpack.testing.local_ranks import LocalRanks

ROLES = ("actor", "rollout", "reward")
STEPS = 3
# Mean difference between the log-probs of engine and trainer, nats: the engine computes in fp32.
GAP = {"fp32": 1e-4, "bf16": 0.05}


def measure(setup: Setup) -> Iterator[Figure]:
    """Yield the phases' times of the last step, after steps that warm up."""
    with tempfile.TemporaryDirectory() as folder, one_rank(setup.device):
        config = config_of(setup, Path(folder) / "run")
        records = take_steps(config, setup.device)
    last = records[-1]
    finite = all(torch.isfinite(torch.tensor(list(record.values()))).all() for record in records)
    yield Figure(f"GRPO steps taken, {last['packing/real_tokens']:,.0f} tokens in the last one", f"{len(records)}")
    yield Figure("metrics that are not finite", "none" if finite else "some", "none", bool(finite))
    gap, limit = last["rollout/logprob_gap"], GAP[config.actor.precision]
    yield Figure("mean gap between engine and trainer", f"{gap:.1e} nats", f"at most {limit:g}", gap <= limit)
    skipped = sum(record["actor/skipped_steps"] for record in records)
    yield Figure("optimizer steps without a usable gradient", f"{skipped:.0f}", "0", skipped == 0)
    for name in sorted(last):
        if name.startswith("time/"):
            yield Figure(f"{name.removeprefix('time/').removesuffix('_s')}, last step", f"{last[name]:.3f} s")


def config_of(setup: Setup, run_dir: Path) -> Config:
    """Return the configuration of a run on the task of arithmetic, with a tiny model or one of 85 M parameters."""
    size = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2304}
    if setup.tiny:
        size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = {"model_type": "qwen2", "num_key_value_heads": size["num_attention_heads"] // 2, **size}
    prompts = 2 if setup.tiny else 32
    actor: dict[str, Any] = {"precision": "fp32" if setup.tiny else "bf16", "isolation_check": not setup.tiny}
    return Config.model_validate(
        {
            "model": Model(config=model | {"tie_word_embeddings": True}),
            "data": Data(generator={"train_size": 256, "validation_size": 4}),
            # A new model has about every second response begin this way.
            "reward": Reward(function="rlpack.rewards.functions:matches", arguments={"pattern": "^[0-9+]"}),
            "rollout": Rollout(max_new_tokens=8 if setup.tiny else 256),
            "trainer": Trainer(steps=1 if setup.tiny else STEPS, prompts_per_step=prompts, group_size=4),
            "sft_warmup": SFTWarmup(steps=0),
            "checkpoint": Checkpoint(every=1000),
            "actor": actor,
            "placement": Placement(pools={"main": Pool(gpus_per_rank=1.0 if setup.device == "cuda" else 0.0)}),
            "run_dir": str(run_dir),
        }
    )


def take_steps(config: Config, device: str) -> list[dict[str, float]]:
    """Take the steps of the recipe and write a checkpoint; return the metrics of each step."""
    tokenizer, prompts, held_out = load_splits(config)
    groups = {name: group_of(config, name, tokenizer, device) for name in ROLES}
    directory, store = Path(str(config.run_dir)), LocalStore()
    with Run.start(config, directory, console=Console(RichConsole(file=StringIO()))) as run:
        train, test = cache_splits(store, tokenizer, prompts, held_out)
        session = Session(config, run, tokenizer, train, test, groups, store)
        sync_weights(session)
        for step in session.steps("train", config.trainer.steps):
            rollouts, score = draw_rollouts(session, step)
            plan = session.actor.plan(rollouts, mini_batches=True)
            rollouts = compute_old_logprobs(session, step, rollouts, plan)
            rollouts = score(step, rollouts)
            rollouts = compute_advantages(session, step, rollouts, plan)
            update_actor(session, step, rollouts, plan)
            sync_weights(session, step)
    records = [json.loads(line) for line in (directory / METRICS).read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in record.items() if name != "phase"} for record in records]


def group_of(config: Config, role: str, tokenizer: PreTrainedTokenizerBase, device: str) -> WorkerGroup[Any]:
    """Return a role that runs in this process, on the device if it has a model."""
    kind = load_class(config.roles[role].target)

    def build(context: RankContext) -> Any:
        return kind.from_settings(replace(context, device=device), config, tokenizer)

    mini_batch_size = config.trainer.mini_batch_size if role == "actor" else None
    return WorkerGroup(role, LocalRanks([build]), role_batching(config, role), mini_batch_size, kind)
