"""The examples, used as their READMEs say: a package that is installed, modules that are on the path."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlpack.cli.main import main
from tests.end_to_end.commands import ROOT, Command, curve, done, steps
from tests.end_to_end.settings import EASY

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
SHORT = (*EASY, "sft_warmup.steps=0", "trainer.steps=2", "trainer.prompts_per_step=4", "trainer.group_size=4",
         "trainer.mini_batch_size=8", "evaluation.samples=1")  # fmt: skip


def commanded(example: str) -> list[str]:
    """Return the overrides of the last command of an example's README."""
    text = (EXAMPLES / example / "README.md").read_text().replace("\\\n", " ")
    words = [shlex.split(line) for line in re.findall(r"^rlpack train .*$", text, re.MULTILINE)]
    return words[-1][2:]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the judge's package is installed into, by nothing but its own pyproject."""
    target = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("source") / "judge_role"
    subprocess.run(["cp", "-r", EXAMPLES / "judge_role", copy], check=True, timeout=30)  # a build writes next to it
    words = ["install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", target, copy]
    subprocess.run([sys.executable, "-m", "pip", *map(str, words)], check=True, timeout=120)
    return target


@pytest.fixture(scope="module")
def judged(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Return a run with the judge, and the advantage function that asks for its column."""
    overrides = commanded("custom_advantage")
    assert set(overrides) >= {"roles.judge.target=judge_role:RepetitionWorker"}
    # Of single tokens, of which nearly every response repeats some, and in favor of those that do.
    odd = ["roles.judge.arguments.n=1", "roles.judge.arguments.weight=-1.0"]
    path = [installed, EXAMPLES / "custom_advantage"]
    return done(tmp_path_factory.mktemp("judged"), *SHORT, *overrides, *odd, path=path)


def test_a_role_of_a_package_of_its_own_scores_beside_the_reward_by_one_line_of_configuration(judged: Command):
    assert steps(judged.run_dir, "train") == [1, 2]
    assert all(0 < reward % 1 < 1 for reward in curve(judged.run_dir, "reward/max"))  # built-in ones are 0 and 1
    assert curve(judged.run_dir, "reward/quarantined") == [0, 0]


def test_a_column_that_a_role_adds_reaches_the_advantage_function_that_names_it(judged: Command):
    means = curve(judged.run_dir, "advantage/mean")
    assert max(means) < -1e-3  # without a share of the good ones taken off, the advantages of each group add up to 0


def test_a_reward_and_a_loss_of_ones_own_train(tmp_path: Path):
    path = [EXAMPLES / "custom_reward", EXAMPLES / "custom_loss"]
    run = done(tmp_path, *SHORT, *commanded("custom_reward"), *commanded("custom_loss"), "sft_warmup.steps=20",
               "sft_warmup.batch_size=16", "sft_warmup.learning_rate=3e-3", ranks=1, path=path)  # fmt: skip
    assert max(curve(run.run_dir, "reward/max")) == 1
    assert min(curve(run.run_dir, "actor/grad_norm")) > 0


@pytest.mark.usefixtures("no_ray")
def test_a_role_whose_argument_is_misspelt_is_refused_before_anything_starts(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(installed)
    words = ["roles.judge.target=judge_role:RepetitionWorker", "roles.judge.arguments.m=2"]
    assert main(["train", *words, f"run_dir={tmp_path / 'run'}"]) == 2
    problem = "roles.judge.arguments (m): got an unexpected keyword argument 'm'"
    assert f"{problem}; it takes n: int = 4, weight: float = 1.0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
