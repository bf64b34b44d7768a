"""Runs that generate the next batch while they train: killed and resumed, they end as if nothing had happened."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlpack.observe.trace import read_spans
from tests.end_to_end.commands import (
    DEADLINE_S,
    Command,
    committed,
    done,
    records,
    started,
    steps,
    until,
    without_times,
)
from tests.end_to_end.in_turns import write_recipe

pytestmark = [pytest.mark.ray, pytest.mark.slow]
AHEAD = (
    "experiment=smoke",
    "placement=two_pools",
    "trainer.lead=1",
    "trainer.steps=5",
    "trainer.mini_batch_size=4",
    "rollout.max_new_tokens=16",
    "checkpoint.keep=9",
)
KL = ("algorithm.kl_coef=0.02",)
RECIPES = {
    "grpo": (*KL, "checkpoint.asynchronous=true"),
    "dapo": ("recipe=dapo", "dapo.overlong_buffer=4"),
    # Engines generate a batch while the one before it is scored.
    "remax, scores apart": (
        "recipe=remax",
        "placement.pools.main.cpus_per_rank=0.9",
        "placement.pools.scores.ranks=1",
        "placement.pools.scores.cpus_per_rank=0.1",
        "placement.roles.reward=scores",
    ),
}


# GRPO with an evaluation that isn't marked as one that may run while the actor trains, so that every step waits for it.
WAITING = """
    from rlpack.recipes.grpo_spec import SPEC


    def main(config):
        from rlpack.recipes import grpo

        ahead = grpo.evaluate
        grpo.evaluate = lambda session, step: ahead(session, step)
        grpo.main(config)
"""

# GRPO in turns, without a queue: each step draws its batch and publishes its weights.
PLAIN = """
    from rlpack.recipes.grpo_spec import SPEC


    def main(config):
        from rlpack.recipes import sft
        from rlpack.recipes.driver import policy_stages as stages
        from rlpack.recipes.driver.draws import draw_rollouts
        from rlpack.recipes.driver.engine_weights import sync_weights
        from rlpack.recipes.driver.evaluation import evaluate
        from rlpack.recipes.driver.open_session import open_session

        with open_session(config) as session:
            sft.sft_warmup(session)
            stages.initialize_reference(session)
            sync_weights(session)
            for step in session.steps("train", config.trainer.steps, evaluate):
                rollouts, score = draw_rollouts(session, step)
                reference = stages.submit_reference_logprobs(session, rollouts)
                plan = session.actor.plan(rollouts, mini_batches=True)
                rollouts = stages.compute_old_logprobs(session, step, rollouts, plan)
                rollouts = stages.collect_reference_logprobs(session, step, rollouts, plan, reference)
                rollouts = stages.compute_advantages(session, step, score(step, rollouts), plan)
                stages.update_actor(session, step, rollouts, plan)
                sync_weights(session, step)
"""


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """Return what of the records doesn't depend on the clock; two threads store their payloads at any time."""
    kept = [without_times(record) for record in records(run_dir)]
    return [{name: value for name, value in record.items() if name != "store/peak_bytes"} for record in kept]


def threads_of(run_dir: Path, name: str) -> list[str]:
    """Return the threads of the driver in which the spans of a name began, in their order."""
    lines = [json.loads(line) for path in run_dir.glob("spans/driver-*.jsonl") for line in path.open()]
    spans = [line for line in lines if isinstance(line, list)]
    return [thread for named, _, _, thread in sorted(spans, key=lambda one: one[1]) if named == name]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name != "grpo")) for name in RECIPES]
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, tuple[str, ...]]:
    """Return an uninterrupted run, and its overrides."""
    overrides = (*AHEAD, *RECIPES[request.param])
    return done(tmp_path_factory.mktemp(f"ahead_{request.param}"), *overrides, ranks=1), overrides


def test_a_run_that_is_killed_ends_as_the_uninterrupted_one_bit_for_bit(
    whole: tuple[Command, tuple[str, ...]], tmp_path: Path
):
    uninterrupted, overrides = whole
    with started(tmp_path, *overrides, "resume=auto", ranks=1, forks_workers=False) as command:
        until(lambda: committed(command.run_dir, "train") != [], DEADLINE_S)
        command.process.kill()  # a step trains, and the batch of the next one is being drawn
        assert command.wait() == -9
        assert committed(command.run_dir, "train")[-1] < 5
    resumed = done(tmp_path, *overrides, "resume=auto", ranks=1)
    assert "resumed after step" in resumed.out
    assert figures(resumed.run_dir) == figures(uninterrupted.run_dir)
    weights, expected = (load_file(run.run_dir / "model" / "model.safetensors") for run in (resumed, uninterrupted))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("whole", ["grpo"], indirect=True)
def test_evaluations_during_training_have_the_figures_of_a_run_that_waits_for_them(
    whole: tuple[Command, tuple[str, ...]], tmp_path: Path
):
    ahead, overrides = whole
    (tmp_path / "waiting_grpo.py").write_text(textwrap.dedent(WAITING))
    waiting = done(tmp_path, "recipe.target=waiting_grpo", *overrides, ranks=1, path=[tmp_path])
    assert figures(waiting.run_dir) == figures(ahead.run_dir)
    assert steps(ahead.run_dir, "evaluation") == [0, 2, 4, 5]
    assert threads_of(waiting.run_dir, "evaluate") == ["MainThread"] * 4
    assert threads_of(ahead.run_dir, "evaluate") == ["MainThread", "evaluate", "evaluate", "MainThread"]


def test_without_a_lead_a_run_is_one_without_a_queue_bit_for_bit(tmp_path: Path):
    words = ("experiment=smoke", "trainer.steps=3", "trainer.mini_batch_size=4", "rollout.max_new_tokens=16", *KL)
    (tmp_path / "plain_grpo.py").write_text(textwrap.dedent(PLAIN))
    runs = [
        done(tmp_path / name, *words, *recipe, ranks=1, path=[tmp_path])
        for name, recipe in (("queue", ("trainer.lead=0",)), ("plain", ("recipe.target=plain_grpo",)))
    ]
    assert figures(runs[0].run_dir) == figures(runs[1].run_dir)
    weights, expected = (load_file(run.run_dir / "model" / "model.safetensors") for run in runs)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo", "remax"])
def test_without_a_lead_every_recipe_is_itself_without_a_queue_bit_for_bit(tmp_path: Path, recipe: str, ranks: int):
    check_in_turns(tmp_path, recipe, ranks=ranks)


def check_in_turns(folder: Path, recipe: str, *overrides: str, ranks: int) -> None:
    """Check that a recipe without a lead has the metrics and weights of the recipe without its queue."""
    words = ("experiment=smoke", "trainer.steps=3", "trainer.mini_batch_size=4", "rollout.max_new_tokens=16")
    words = (*words, f"recipe={recipe}", *overrides)
    queue = done(folder / "queue", *words, "trainer.lead=0", ranks=ranks)
    target = f"recipe.target={write_recipe(folder, recipe)}"
    plain = done(folder / "plain", *words, target, ranks=ranks, path=[folder])
    assert steps(queue.run_dir, "train") == [1, 2, 3]
    assert figures(queue.run_dir) == figures(plain.run_dir)
    weights, expected = (load_file(run.run_dir / "model" / "model.safetensors") for run in (queue, plain))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_resumed_run_keeps_its_lead(whole: tuple[Command, tuple[str, ...]]):
    uninterrupted, overrides = whole
    words = [*overrides, "resume=auto", "trainer.lead=0"]
    with started(uninterrupted.folder, *words, ranks=1) as command:
        assert command.wait() == 2
    assert "trainer.lead is 0 and the checkpoint in run_dir=" in command.err
    assert "was written with 1; set trainer.lead as it was" in command.err


@pytest.mark.parametrize("whole", ["grpo"], indirect=True)
def test_records_tell_how_old_responses_are_and_how_many_batches_wait(whole: tuple[Command, tuple[str, ...]]):
    uninterrupted, _ = whole
    trained = [record for record in records(uninterrupted.run_dir) if record["phase"] == "train"]
    assert [record["rollout/lag_mean"] for record in trained] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [record["rollout/batches_waiting"] for record in trained] == [1.0] * 5


@pytest.mark.parametrize("whole", ["grpo"], indirect=True)
def test_every_process_records_what_a_timeline_shows(whole: tuple[Command, tuple[str, ...]]):
    uninterrupted, _ = whole
    spans = {process.process: process.spans for process in read_spans(uninterrupted.run_dir)}
    assert spans.keys() == {"driver", "main/0", "engines/0"}
    kinds = {process: {span.kind for span in own} - {"other"} for process, own in spans.items()}
    assert kinds["main/0"] >= {"log-probs", "update", "weights", "checkpoint"}
    assert kinds["engines/0"] >= {"generation", "scoring", "weights"}
    names = {process: {span.name for span in own} for process, own in spans.items()}
    assert names["main/0"] >= {"forward", "backward", "optimizer"}
    assert names["driver"] >= {"plan actor", "generate", "sync", "checkpoint"}


@pytest.mark.parametrize("whole", ["grpo"], indirect=True)
def test_the_report_shows_the_last_three_steps_and_the_engines(whole: tuple[Command, tuple[str, ...]]):
    uninterrupted, _ = whole
    page = (uninterrupted.run_dir / "report.html").read_text()
    sections = dict(re.findall(r"<h2>(Timeline|Engines)</h2><p>([^<]*)</p><img [^>]*src=\"data:image/svg", page))
    assert sections["Timeline"].startswith("The last 3 steps.")
    assert re.search(r"Log-probs and updates ran during [1-9]\d*% of generation", sections["Timeline"])
    assert re.search(r"While busy: engines/0 [\d,]+ tokens/s", sections["Engines"])
