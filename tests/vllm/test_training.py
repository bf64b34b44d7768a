"""A run with `rollout=vllm`: killed in the middle and resumed, it is the uninterrupted one bit for bit.

So is one whose engines have a pool of their own, and one with a lead is its own uninterrupted run.
"""

from collections.abc import Sequence
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
from tests.end_to_end.settings import FIRST_CHARACTER, UNEVEN
from tests.end_to_end.test_running_ahead import check_in_turns, figures

STEPS = 3
OVERRIDES: Sequence[str] = (
    *UNEVEN,
    *FIRST_CHARACTER,
    "rollout=vllm",
    "rollout.max_new_tokens=20",
    "rollout.kv_cache_gb=0.05",
    "sft_warmup.steps=2",
    f"trainer.steps={STEPS}",
    "evaluation.every=2",
    "checkpoint.every=1",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return done(tmp_path_factory.mktemp("whole"), *OVERRIDES)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Kill a run's driver once its second step is logged, and run it to its end."""
    folder: Path = tmp_path_factory.mktemp("resumed")
    with started(folder, *OVERRIDES, forks_workers=False) as command:
        command.wait_for("train", STEPS - 1)
        until(lambda: bool(committed(command.run_dir, "train")), DEADLINE_S)
        command.process.kill()
        assert command.wait() == -9
        assert command.left_behind() == []  # vLLM's processes included
        assert committed(command.run_dir, "train")[-1] < STEPS
    return done(folder, *OVERRIDES, "resume=auto")


def test_every_step_is_trained_and_logged_once(whole: Command, resumed: Command):
    for run in (whole, resumed):
        assert steps(run.run_dir, "train") == list(range(1, STEPS + 1))


def test_every_step_changes_the_weights(whole: Command):
    assert all(record["actor/grad_norm"] > 0 for record in records(whole.run_dir) if record["phase"] == "train")


def test_the_first_group_is_scored_while_others_are_sampled(whole: Command):
    driver, *ranks = read_spans(whole.run_dir)
    for batch in [span for span in driver.spans if span.name == "generate"]:
        inside = [one for rank in ranks for one in rank.spans if batch.begin_us <= one.begin_us < batch.end_us]
        sampled, scored = ([one for one in inside if one.kind == kind] for kind in ("generation", "scoring"))
        assert min(one.begin_us for one in scored) < max(one.end_us for one in sampled)


def test_every_metric_is_that_of_the_uninterrupted_run(whole: Command, resumed: Command):
    pairs = zip(records(resumed.run_dir), records(whole.run_dir), strict=True)
    for one, other in pairs:
        # How much the store holds at once depends on which groups end first.
        assert without_times(one | {"store/peak_bytes": 0}) == without_times(other | {"store/peak_bytes": 0})


def test_the_weights_are_those_of_the_uninterrupted_run_bit_for_bit(whole: Command, resumed: Command):
    one, other = (load_file(run.run_dir / "model" / "model.safetensors") for run in (resumed, whole))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_vllms_log_probs_are_the_trainers(whole: Command):
    trained = [record for record in records(whole.run_dir) if record["phase"] == "train"]
    assert all(record["rollout/logprob_gap"] <= 1e-4 for record in trained)
    gaps = [record["rollout/canary_gap"] for record in trained if "rollout/canary_gap" in record]
    assert len(gaps) >= STEPS - 1  # nothing is sampled after the last step
    assert all(0 < gap <= 1e-4 for gap in gaps)  # not 0: the two forward passes are different implementations


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_engines_in_a_pool_of_their_own_train_the_same_policy_as_colocated_ones(
    whole: Command, tmp_path: Path, engine: str
):
    """One vLLM samples the bits that two do; log-probs of `hf` depend, by rounding, on the rows of a batch."""
    if engine == "vllm":
        overrides, colocated, engines = OVERRIDES, whole, 1
    else:
        overrides = [word for word in OVERRIDES if word != "rollout=vllm" and not word.startswith("rollout.kv_cache")]
        colocated, engines = done(tmp_path / "colocated", *overrides), 2
    own = ("placement=two_pools", f"placement.pools.engines.ranks={engines}")
    apart = done(tmp_path / "apart", *overrides, *own)
    assert (apart.run_dir / "config.yaml").read_text().count("engines:") == 1
    for one, other in zip(records(apart.run_dir), records(colocated.run_dir), strict=True):
        assert without_placement(one) == without_placement(other)
    one, other = (load_file(run.run_dir / "model" / "model.safetensors") for run in (apart, colocated))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_run_ahead_that_is_killed_and_resumed_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path):
    """With `rollout.publish=drain`, which keeps the published weights while the next batch is drawn."""
    words = (*OVERRIDES, "placement=two_pools", "trainer.lead=1")
    whole = done(tmp_path / "whole", *words, ranks=1)
    with started(tmp_path / "killed", *words, ranks=1, forks_workers=False) as command:
        until(lambda: bool(committed(command.run_dir, "train")), DEADLINE_S)
        command.process.kill()  # a step trains, and vLLM samples the batch of the next one
        assert command.wait() == -9
        assert command.left_behind() == []
        assert committed(command.run_dir, "train")[-1] < STEPS
    resumed = done(tmp_path / "killed", *words, "resume=auto", ranks=1)
    assert figures(resumed.run_dir) == figures(whole.run_dir)
    assert max(record.get("rollout/lag", 0) for record in records(whole.run_dir)) == 1
    one, other = (load_file(run.run_dir / "model" / "model.safetensors") for run in (resumed, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo", "remax"])
def test_without_a_lead_every_recipe_is_itself_without_a_queue_bit_for_bit(tmp_path: Path, recipe: str):
    check_in_turns(tmp_path, recipe, "rollout=vllm", "rollout.kv_cache_gb=0.05", ranks=1)


def without_placement(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in without_times(record).items() if not name.startswith("store/")}


def test_no_process_is_left(whole: Command, resumed: Command):
    assert [run.left_behind() for run in (whole, resumed)] == [[], []]
