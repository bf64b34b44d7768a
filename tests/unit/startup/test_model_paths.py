"""Relative folders of models: absolute for ranks, and the same ones for a resumed run."""

from pathlib import Path

import pytest

from rlpack.config.schema import Config, Critic, Model, RewardModel
from rlpack.installation import RAY_JOB
from rlpack.startup.model_paths import is_same_model, with_absolute_models


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a model's folder."""
    (tmp_path / "here" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    return tmp_path / "here"


def named(path: str | None) -> Config:
    """Return a configuration whose models and tokenizer all have one path."""
    return Config(model=Model(path=path, tokenizer=path), critic=Critic(path=path), reward_model=RewardModel(path=path))


@pytest.mark.parametrize("path", ["mine", "./mine", "../here/mine/", "~/mine"])
def test_the_paths_of_existing_folders_become_absolute(folder: Path, path: str):
    assert with_absolute_models(named(path), {}) == named(str(folder / "mine"))


def test_a_folder_with_the_name_of_a_model_on_the_hub_is_the_folder(folder: Path):
    (folder / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert with_absolute_models(named("Qwen/Qwen3-0.6B"), {}) == named(str(folder / "Qwen" / "Qwen3-0.6B"))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("path", [None, "Qwen/Qwen3-0.6B", "other", "/other"])
def test_everything_else_stays(path: str | None):
    assert with_absolute_models(named(path), {}) == named(path)


@pytest.mark.usefixtures("folder")
def test_a_submitted_job_keeps_the_paths_into_its_uploaded_files():
    assert with_absolute_models(named("mine"), {RAY_JOB: "{}"}) == named("mine")


def test_other_spellings_of_a_folder_and_a_moved_folder_name_the_same_model(folder: Path, tmp_path: Path):
    (folder / "link").symlink_to("mine")
    mine = str(folder / "mine")
    for before in ("mine", "./mine", "../here/mine", "~/mine", mine, str(folder / "link")):
        assert is_same_model(before, mine)
        assert is_same_model(mine, before)
        assert is_same_model(before, "mine")
    assert is_same_model("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert is_same_model(None, None)
    assert is_same_model(str(tmp_path / "moved" / "mine"), mine)


def test_another_folder_or_name_is_another_model(folder: Path, tmp_path: Path):
    mine = str(folder / "mine")
    (tmp_path / "there" / "mine").mkdir(parents=True)
    for before in (str(tmp_path / "there" / "mine"), str(tmp_path / "gone" / "other"), "other/mine", None):
        assert not is_same_model(before, mine)
    assert not is_same_model("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")
    assert not is_same_model(mine, None)
