"""A run that is stopped in several ways and resumed ends as an uninterrupted one, bit for bit."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlpack.recipes.driver.reference_policy import reference_model
from tests.end_to_end.commands import committed, done, records, started, steps, without_times
from tests.end_to_end.settings import REFERENCE, UNEVEN

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ASYNCHRONOUS = "checkpoint.asynchronous=true"
OVERRIDES = (*UNEVEN, *REFERENCE, "trainer.steps=9", "resume=auto")

FAILING_ADVANTAGE = """
BATCHES = []

def failing(rewards):
    BATCHES.append(rewards)
    if len(BATCHES) == 4:  # the first are example rows, before the start
        raise ValueError("the third batch")
    return rewards - rewards.mean()
"""


@dataclass
class Stop:
    """The outcome of a stopped command: exit code, output, committed steps, last logged step, surviving processes."""

    code: int
    out: str
    err: str
    sft_warmup: list[int]
    train: list[int]
    logged: int
    left: list


@dataclass
class Stopped:
    """One run, stopped and resumed three times, and the output of the last command."""

    run_dir: Path
    in_warm_up: Stop
    in_training: Stop
    killed: Stop
    out: str


def stop(folder: Path, phase: str, step: int, how: str, *overrides: str) -> Stop:
    """Continue the run, stop it once `step` of `phase` is logged, and return the outcome."""
    with started(folder, *OVERRIDES, *overrides, forks_workers=how != "kill") as command:
        command.wait_for(phase, step)
        assert len(command.processes()) > 2  # driver, Ray's processes and ranks, all with the command's mark
        if how == "kill":
            command.process.kill()
        elif how == "scheduler":
            command.terminate()
        else:
            command.interrupt()
        return Stop(
            code=command.wait(),
            left=command.left_behind(),
            out=command.out,
            err=command.err,
            sft_warmup=committed(command.run_dir, "sft_warmup"),
            train=committed(command.run_dir, "train"),
            logged=records(command.run_dir)[-1]["step"],
        )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    in_warm_up = stop(folder, "sft_warmup", 4, "terminal")
    in_training = stop(folder, "train", 2, "scheduler")
    # While checkpoints are written in the background, the newest may be unfinished.
    killed = stop(folder, "train", in_training.train[-1] + 1, "kill", ASYNCHRONOUS)
    last = done(folder, *OVERRIDES, ASYNCHRONOUS)
    return Stopped(last.run_dir, in_warm_up, in_training, killed, last.out)


@pytest.mark.parametrize("when", ["in_warm_up", "in_training"])
def test_ctrl_c_or_sigterm_finishes_the_step_and_ends_with_130_and_one_line(stopped, when):
    ended = getattr(stopped, when)
    assert ended.code == 130
    assert ended.err.count("interrupted: finishing the step, then saving") == 1
    assert "Traceback" not in ended.err
    assert "report: " in ended.out


def test_ctrl_c_in_the_warm_up_commits_the_step_in_progress(stopped):
    ended = stopped.in_warm_up
    assert 4 <= ended.logged < 20
    assert (ended.sft_warmup[-1], ended.train) == (ended.logged, [])


def test_sigterm_in_training_commits_the_step_in_progress(stopped):
    ended = stopped.in_training
    assert 2 <= ended.logged < 9
    assert ended.train[-1] == ended.logged


def test_a_run_whose_driver_is_killed_keeps_its_last_checkpoint(stopped):
    assert stopped.killed.code == -9
    assert stopped.in_training.logged <= stopped.killed.train[-1] < 9


@pytest.mark.parametrize("when", ["in_warm_up", "in_training", "killed"])
def test_no_process_outlives_the_command(stopped, when):
    assert getattr(stopped, when).left == []


def test_a_resumed_run_prints_where_it_continues(stopped):
    matches = [re.search(r"resumed after step (\d+) of (\w+) from", text) for text in (stopped.killed.out, stopped.out)]
    assert [(int(match[1]), match[2]) for match in matches if match] == [
        (stopped.in_training.logged, "train"),
        (stopped.killed.train[-1], "train"),
    ]


def test_a_resumed_run_finds_its_records_as_it_left_them(stopped):
    assert not [ended for ended in (stopped.in_training, stopped.killed) if "changed after the checkpoint" in ended.err]


def test_every_step_is_logged_once(stopped):
    assert steps(stopped.run_dir, "sft_warmup") == list(range(1, 21))
    assert steps(stopped.run_dir, "train") == list(range(1, 10))
    assert steps(stopped.run_dir, "evaluation") == [0, 2, 4, 6, 8, 9]


def test_every_metric_of_every_step_is_that_of_the_uninterrupted_run(stopped, uninterrupted):
    resumed, expected = records(stopped.run_dir), records(uninterrupted.run_dir)
    assert len(resumed) == len(expected)
    for one, other in zip(resumed, expected, strict=True):
        assert without_times(one) == without_times(other)


def test_time_never_decreases(stopped):
    times = [record["time_s"] for record in records(stopped.run_dir)]
    assert times == sorted(times)


def test_the_weights_are_those_of_the_uninterrupted_run_bit_for_bit(stopped, uninterrupted):
    resumed, expected = (load_file(run.run_dir / "model" / "model.safetensors") for run in (stopped, uninterrupted))
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_the_logged_samples_are_those_of_the_uninterrupted_run(stopped, uninterrupted):
    resumed, expected = ((run.run_dir / "samples.jsonl").read_text() for run in (stopped, uninterrupted))
    assert resumed == expected


def test_the_reference_stays_the_policy_that_training_began_with(stopped, uninterrupted):
    reference, same = (load_file(reference_model(r.run_dir) / "model.safetensors") for r in (stopped, uninterrupted))
    trained = load_file(stopped.run_dir / "model" / "model.safetensors")
    assert all(torch.equal(reference[name], same[name]) for name in same)
    assert not all(torch.equal(reference[name], trained[name]) for name in trained)


def test_an_error_of_the_driver_leaves_the_checkpoint_that_is_being_written(tmp_path):
    (tmp_path / "advantages.py").write_text(FAILING_ADVANTAGE)
    overrides = ("experiment=smoke", "algorithm.advantage=advantages:failing", "checkpoint.every=1")
    with started(tmp_path, *overrides, "trainer.steps=4", ASYNCHRONOUS, path=[tmp_path]) as command:
        assert command.wait() == 1
        assert "ValueError: the third batch" in command.err
        assert "the run is ending; waiting for the checkpoint under way" in command.err
        assert committed(command.run_dir, "train")[-1] == 2
        assert command.left_behind() == []
