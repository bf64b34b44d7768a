"""The options of dry runs and of suggestions for a configuration, and their exit codes."""

import re
import sys
from pathlib import Path

import pytest

from rlpack.cli.dry_run import split_options
from rlpack.cli.main import main
from rlpack.cli.suggest import is_for_config
from rlpack.config.errors import ConfigError

SMALL = [
    *("recipe=sft", "trainer.prompts_per_step=4", "data.generator.train_size=16", "data.generator.validation_size=4"),
    "actor.isolation_check=false",
]


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_options_are_taken_from_the_overrides():
    assert split_options(["a=1", "--dry-run", "--memory-gb", "24", "--cfg", "job"]) == (
        True,
        24.0,
        ["a=1", "--cfg", "job"],
    )
    assert split_options(["--memory-gb=2.5", "--dry-run"]) == (True, 2.5, [])
    assert split_options(["a=1"]) == (False, None, ["a=1"])


@pytest.mark.parametrize("words", [["--dry-run", "--memory-gb", "0"], ["--dry-run", "--memory-gb"], ["--memory-gb=8"]])
def test_memory_is_a_number_above_0_for_a_dry_run(words: list[str]):
    with pytest.raises(ConfigError, match="--memory-gb"):
        split_options(words)


def test_a_dry_run_takes_no_value():
    with pytest.raises(ConfigError, match="--dry-run=1: --dry-run takes no value"):
        split_options(["--dry-run=1"])


def test_the_exit_code_says_whether_the_run_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--dry-run", "--memory-gb", "8", *SMALL]) == 0
    assert "it fits" in capsys.readouterr().out
    assert main(["train", "--dry-run", "--memory-gb", "0.1", *SMALL]) == 1
    assert "it does not fit" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_warns_of_a_run_dir_that_a_run_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    (tmp_path / "config.yaml").write_text("")
    assert main(["train", "--dry-run", "--memory-gb", "8", f"run_dir={tmp_path}", *SMALL]) == 0
    assert f"a run from here would be refused: run_dir={tmp_path} already contains a run" in caplog.text
    assert "it fits" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_pools_of_other_machines_are_estimated(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--dry-run", "--memory-gb", "8", "placement=eight_gpus", *SMALL]) == 0
    assert "pool main: 8 ranks, a GPU each" in capsys.readouterr().out


def test_mistakes_are_those_of_a_run(capsys: pytest.CaptureFixture[str]):
    for command in (["train", "--dry-run"], ["plan", "--suggest"]):
        assert main([*command, "recipe=sft", "actor.lora.rnk=3"]) == 2
        assert "actor.lora.rnk is not a key" in capsys.readouterr().err
        assert main([*command, "recipe=sft", "actor.parallel.tp=3"]) == 2
        assert "actor.parallel.tp (3) doesn't divide" in capsys.readouterr().err


def test_jobs_of_a_sweep_are_estimated_one_after_another(capsys: pytest.CaptureFixture[str]):
    sweep = ["--multirun", "batching.max_tokens=256,512"]
    assert main(["train", "--dry-run", "--memory-gb", "8", *SMALL, *sweep]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^job 1 of 2 \(.*batching.max_tokens=256", shown, re.MULTILINE)
    assert shown.count("it fits") == 2
    assert not list(Path().iterdir()), "a dry run writes nothing"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--suggest"], True),
        (["--suggest", "recipe=sft", "--memory-gb", "24"], True),
        (["--suggest", "recipe=sft", "~data.generator"], True),
        (["--suggest", "--config-dir", "mine", "-cn", "other", "recipe=sft"], True),
        (["--suggest", "--config-dir=mine"], True),
        (["--suggest", "--config-dir", "mine", "lengths.jsonl"], False),
        (["lognormal", "--suggest"], False),
        (["lengths.jsonl", "--suggest", "--ranks", "8"], False),
        (["recipe=sft"], False),
    ],
)
def test_suggestions_are_for_a_configuration_unless_lengths_are_given(words: list[str], expected: bool):
    assert is_for_config(words) is expected


def test_lengths_whose_path_has_an_equals_sign_are_no_override(tmp_path: Path):
    folder = tmp_path / "run p" / "lr=0.1"
    assert is_for_config([str(folder), "--suggest"])
    folder.mkdir(parents=True)
    assert not is_for_config([str(folder), "--suggest"])


def test_an_option_for_lengths_has_no_effect_on_a_configuration(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--suggest", "recipe=sft", "--picture=x.png"]) == 2
    assert "--picture has no effect" in capsys.readouterr().err


def test_suggestions_read_the_users_configs_and_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.path", list(sys.path))
    folder = tmp_path / "configs" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ntrainer:\n  group_size: 0\n")
    (tmp_path / "suggested_rewards.py").write_text("def score(text): ...\n")
    for option in (["--config-dir", "configs"], ["--config-dir=configs"], ["-cd", "configs"]):
        assert main(["plan", "--suggest", *option, "experiment=mine"]) == 2
        assert "trainer.group_size is 0" in capsys.readouterr().err
    # The module is found and read: what is wrong is its function.
    assert main(["plan", "--suggest", "reward.function=suggested_rewards:score"]) == 2
    assert "suggested_rewards:score doesn't name the texts that it takes" in capsys.readouterr().err
