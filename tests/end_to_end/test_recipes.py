"""Recipes learn in twenty short steps; `make test-recipes` lets them learn the whole task.

`make test` runs PPO, and `make test-long` all of them. In tests/distributed/test_recipe_steps.py, the others train for
a few steps.
"""

import math
from pathlib import Path

import pytest

from rlpack.observe.metric_table import unknown_names
from tests.end_to_end.commands import curve, done, records, steps
from tests.end_to_end.settings import EASY

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEPS = 20
TASK = (*EASY, "data.generator.noise=0.5")
# Metrics that distinguish a recipe.
OWN = {
    "ppo": ("critic/loss", "critic/explained_variance", "critic/grad_norm", "reference/kl"),
    "dapo": ("sampling/rounds", "sampling/informative_fraction"),
    "gspo": ("reference/kl",),
    "rloo": (),
    "reinforce_plus_plus": ("reference/kl",),
    "dr_grpo": (),
    "cispo": (),
    "sapo": ("reference/kl",),
    "gmpo": ("actor/clip_high_fraction",),
    "opo": ("reference/kl",),
    "remax": ("reward/greedy_mean", "reference/kl"),
}
# PPO trains two roles; the losses and stages of the others are compared over ranks in tests/distributed.
RANKS = {"ppo": 2}


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a supervised model, from which every recipe starts."""
    run = done(
        tmp_path_factory.mktemp("supervised"),
        *TASK,
        "recipe=sft",
        "trainer.steps=80",
        "trainer.prompts_per_step=32",
        "actor.optimizer.learning_rate=2e-3",
        "actor.optimizer.schedule=cosine",
        "actor.optimizer.warmup_steps=8",
        "evaluation.every=80",
        "checkpoint.every=80",
    )
    return run.run_dir / "model"


@pytest.mark.parametrize(
    "recipe", [name if name == "ppo" else pytest.param(name, marks=pytest.mark.long) for name in OWN]
)
def test_a_recipe_learns(tmp_path, supervised: Path, recipe: str) -> None:
    run = done(
        tmp_path,
        *TASK,
        "model=pretrained",
        f"model.path={supervised}",
        f"recipe={recipe}",
        "sft_warmup.steps=0",
        f"trainer.steps={STEPS}",
        "trainer.prompts_per_step=16",
        "trainer.group_size=8",
        "trainer.mini_batch_size=64",
        "actor.optimizer.learning_rate=5e-4",
        "actor.optimizer.schedule=linear",
        f"evaluation.every={STEPS}",
        f"checkpoint.every={STEPS}",
        *(["dapo.overlong_buffer=2"] if recipe == "dapo" else []),
        ranks=RANKS.get(recipe, 1),
    )
    rewards = curve(run.run_dir, "reward/mean")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    assert steps(run.run_dir, "train") == list(range(1, STEPS + 1))
    for record in records(run.run_dir):
        metrics = {name: value for name, value in record.items() if name not in {"step", "phase", "time_s"}}
        assert unknown_names(metrics) == []
        assert all(math.isfinite(value) for value in metrics.values()), record
    for name in OWN[recipe]:
        assert len(curve(run.run_dir, name)) == STEPS
