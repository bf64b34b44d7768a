"""Whole recipes on real roles in this process: repeated steps and left-out passes change nothing."""

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.compose import PRESETS, compose
from rlpack.config.roles import role_batching, started_roles
from rlpack.config.schema import Algorithm, Evaluation, Rollout, Trainer
from rlpack.distributed.errors import RoleError
from rlpack.distributed.process import load_class
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.gloo import GLOO
from rlpack.observe.metric_table import unknown_names
from rlpack.packing import Batching
from rlpack.recipes.driver import policy_stages
from rlpack.recipes.driver.session import Session
from rlpack.testing.local_ranks import LocalRanks
from rlpack.worker import RankContext, Trainable, Worker, sharded
from rlpack.workers.actor import ActorWorker
from tests.unit.recipes.driver.sessions import run_of, session_of

STEPS = 2
TRAINER = Trainer(steps=STEPS, prompts_per_step=4, group_size=2, mini_batch_size=4, updates_per_batch=2)
ONE_UPDATE = TRAINER.model_copy(update={"mini_batch_size": None, "updates_per_batch": 1})
IN_LOSS, IN_REWARD = Algorithm(kl_coef=0.1), Algorithm(kl_coef=0.1, kl_placement="reward")
ADVANTAGES = {"remax": {"advantage": "remax"}}
SETTINGS_OF_GRPO = sorted(
    path.stem for path in PRESETS.glob("recipe/*.yaml") if "target: rlpack.recipes.grpo\n" in path.read_text()
)


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


class TextReward(Worker):
    """Rewards a function of the text; one call, counted from 1, fails."""

    def __init__(self, context: RankContext, failing_call: int | None) -> None:
        super().__init__(context)
        self._failing_call = failing_call
        self._calls = 0

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        self._calls += 1
        if self._calls == self._failing_call:
            raise ValueError("failed midway")
        rewards = torch.tensor([sum(map(ord, text)) % 7 / 7 for text in shard["completion"]])
        return shard.keep([]).union({"rewards": rewards, "quarantined": torch.zeros(len(rewards), dtype=torch.bool)})


def local_session(folder: Path, recipe: str, *, failing_call: int | None = None, **sections: Any) -> Session:
    """Return a session whose roles are objects of this process, one rank each."""
    folder.mkdir()
    defaults = {
        "trainer": TRAINER,
        "rollout": Rollout(max_new_tokens=6),
        "batching": Batching(max_tokens=96),
        "evaluation": Evaluation(samples=1),
    }
    session = session_of(folder, recipe=recipe, **(defaults | sections))
    config = session.config
    for name in started_roles(config):
        kind = TextReward if name == "reward" else load_class(config.roles[name].target)

        def build(context: RankContext, kind: Any = kind) -> Worker:
            if kind is TextReward:
                return TextReward(context, failing_call)
            return kind.from_settings(context, config, session.tokenizer)

        mini_batch_size = config.trainer.mini_batch_size if issubclass(kind, Trainable) else None
        group = WorkerGroup(name, LocalRanks([build]), role_batching(config, name), mini_batch_size, kind)
        session.groups[name] = group
    return session


def train(session: Session, recipe: str) -> dict[str, np.ndarray]:
    """Run the recipe's own steps and return the policy's weights after them."""
    importlib.import_module(f"rlpack.recipes.{recipe}").train(session)
    folder = session.run.run_dir / "policy"
    session.actor.run(ActorWorker.export_model, str(folder))
    return load_file(folder / "model.safetensors")


def records(session: Session) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(("time/", "throughput/", "perf/"))}
        for record in run_of(session).records
    ]


@pytest.mark.parametrize("recipe", SETTINGS_OF_GRPO)
def test_each_recipe_that_is_settings_of_grpo_trains(tmp_path: Path, recipe: str):
    session = local_session(tmp_path / "run", "grpo", algorithm=compose([f"recipe={recipe}"]).algorithm)
    before = tmp_path / "before"
    session.actor.run(ActorWorker.export_model, str(before))
    trained, initial = train(session, "grpo"), load_file(before / "model.safetensors")
    assert all(np.isfinite(weight).all() for weight in trained.values())
    assert not any(np.array_equal(trained[name], initial[name]) for name in initial)
    assert len(records(session)) == STEPS + 2
    for record in run_of(session).records:
        assert unknown_names(record) == []
        assert all(math.isfinite(value) for value in record.values()), record


@pytest.mark.parametrize(
    ("recipe", "algorithm"), [("grpo", IN_LOSS), ("ppo", IN_REWARD), ("dapo", Algorithm()), ("remax", IN_REWARD)]
)
def test_a_step_that_failed_midway_and_is_run_again_ends_as_an_undisturbed_one(
    tmp_path: Path, recipe: str, algorithm: Algorithm
):
    algorithm = algorithm.model_copy(update=ADVANTAGES.get(recipe, {}))
    undisturbed = local_session(tmp_path / "undisturbed", recipe, algorithm=algorithm)
    expected = train(undisturbed, recipe)
    # Two calls are the evaluation's, then each step has one, or two with greedy responses.
    failing_call = 6 if recipe == "remax" else 4
    disturbed = local_session(tmp_path / "disturbed", recipe, algorithm=algorithm, failing_call=failing_call)
    with pytest.raises(RoleError, match="failed midway"):
        train(disturbed, recipe)
    weights = train(disturbed, recipe)
    assert disturbed.progress == undisturbed.progress
    assert records(disturbed) == records(undisturbed)
    assert len(records(disturbed)) == STEPS + 2
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("recipe", "algorithm"), [("grpo", Algorithm()), ("grpo", IN_LOSS), ("ppo", IN_LOSS), ("dapo", Algorithm())]
)
def test_a_single_update_needs_no_pass_before_it(
    tmp_path: Path, recipe: str, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
):
    short = local_session(tmp_path / "short", recipe, algorithm=algorithm, trainer=ONE_UPDATE)
    weights = train(short, recipe)
    long = local_session(tmp_path / "long", recipe, algorithm=algorithm, trainer=ONE_UPDATE)
    monkeypatch.setattr(policy_stages, "needs_old_logprobs", lambda *_: True)
    expected = train(long, recipe)
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)
    assert len(records(short)) == STEPS + 2
    for one, other in zip(records(short), records(long), strict=True):
        # What only the pass before several updates reports is, with one update, what the update itself measures.
        twins = {"actor/old_entropy": "actor/entropy", "reference/kl_bounded_fraction": "actor/kl_bounded_fraction"}
        only_before = {name: one[twin] for name, twin in twins.items() if name in other}
        assert one | only_before == pytest.approx(other, rel=1e-6)
    timers = {name for record in run_of(short).records for name in record}
    assert "time/logprobs_s" not in timers
