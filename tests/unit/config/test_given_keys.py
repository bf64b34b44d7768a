"""Keys that are set to their defaults, which only the overrides tell."""

from pathlib import Path

import pytest

from rlpack.cli.evaluate import _base_values
from rlpack.cli.train import compose_jobs
from rlpack.config.compose import compose, compose_evaluation
from rlpack.config.errors import ConfigError
from rlpack.startup.evaluated_model import EvaluatedModel

OWN = "reward.functions.a.function=rlpack.rewards.functions:exact_match"
DEFAULT = "reward.function=rlpack.rewards.functions:final_answer"
LENGTHS = ("trainer.steps=50", "trainer.data_epochs=2")


@pytest.mark.parametrize("make", [compose, compose_jobs])
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([OWN, DEFAULT], "reward.function is rlpack.rewards.functions:final_answer, but reward.functions has a"),
        ([f"+{OWN}", f"++{DEFAULT}"], "so it would have no effect; leave out one of them"),
        ([*LENGTHS], "trainer.steps and trainer.data_epochs both say how long to train; set one of them"),
    ],
)
def test_a_key_that_another_one_rules_out_is_refused_at_its_default_too(make, overrides, said):
    with pytest.raises(ConfigError) as caught:
        make(overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "steps", "epochs"),
    [
        (["trainer.steps=3"], None, None),  # refused
        (["trainer.steps=3", "trainer.data_epochs=null"], 3, None),
        (["trainer.data_epochs=1"], 50, 1.0),
        ([], 50, 2.0),
    ],
)
def test_steps_on_the_command_line_are_never_ignored_for_the_epochs_of_a_preset(
    tmp_path: Path, overrides: list[str], steps: int | None, epochs: float | None
):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  data_epochs: 2\n")
    command = ["--config-dir", str(tmp_path), "experiment=mine", *overrides]
    if steps is None:
        with pytest.raises(
            ConfigError, match=r"set one of them \(or trainer\.data_epochs=null, where a preset sets it"
        ):
            compose_jobs(command)
    else:
        trainer = compose_jobs(command)[0].config.trainer
        assert (trainer.steps, trainer.data_epochs) == (steps, epochs)


def test_an_evaluation_scores_with_the_function_that_it_names_or_says_why_not(tmp_path: Path):
    state = {"config": compose([OWN]).model_dump(mode="json")}
    run = EvaluatedModel("mine-step-2", checkpoint=tmp_path, state=state)
    assert list(compose_evaluation([], _base_values(run, [])).reward.functions) == ["a"]
    with pytest.raises(ConfigError, match=r"~reward\.functions leaves out those of an evaluated run"):
        compose_evaluation([DEFAULT], _base_values(run, [DEFAULT]))
    without = [DEFAULT, "~reward.functions"]
    reward = compose_evaluation(without, _base_values(run, without)).reward
    assert (reward.functions, reward.function) == ({}, DEFAULT.partition("=")[2])
