"""Presets that a command chooses and that its experiment overrides."""

from pathlib import Path

import pytest

from rlpack.cli.train import compose_jobs

MINE = "# @package _global_\nlogger:\n  tensorboard: true\ntrainer:\n  steps: 3\n"


def warnings(*words: str) -> list[str]:
    (job,) = compose_jobs(list(words))
    return list(job.overridden)


@pytest.fixture
def mine(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(MINE)
    own = {
        "model/own": "config:\n  model_type: qwen2\n  rms_norm_eps: 1e-6\n",
        "rollout/cool": "temperature: 0.5\n",
        "placement/own": "# @package _global_\nrollout:\n  temperature: 0.7\n",
    }
    for name, text in own.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    return ("--config-dir", str(tmp_path))


def test_an_experiment_that_overrides_a_chosen_preset_is_named_with_the_way_out(mine: tuple[str, str]):
    assert warnings(*mine, "logger=console", "experiment=mine") == [
        "logger=console sets logger.tensorboard=false, but experiment=mine, which comes last, sets true; add "
        "logger.tensorboard=false to the command if you want that value"
    ]
    assert warnings("experiment=smoke", "checkpoint=default") == [
        "checkpoint=default sets checkpoint.every=20, but experiment=smoke, which comes last, sets 1; add "
        "checkpoint.every=20 to the command if you want that value"
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("logger=console",),
        ("experiment=mine",),
        ("logger=tensorboard", "experiment=mine"),
        ("logger=console", "experiment=mine", "logger.tensorboard=false"),
        ("model=own", "experiment=mine"),  # 1e-6 is the same number in YAML's and in OmegaConf's eyes
        ("rollout=cool", "placement=own", "experiment=mine"),  # it is not the experiment that overrides it
        ("recipe=ppo", "experiment=mine"),  # an experiment's steps are meant to replace those of the recipe
    ],
)
def test_nothing_is_said_where_the_choice_has_its_effect(mine: tuple[str, str], words: tuple[str, ...]):
    assert warnings(*mine, *words) == []


def test_a_users_own_choice_counts_where_hydra_finds_it(mine: tuple[str, str]):
    folder = Path(mine[1]) / "logger"
    folder.mkdir()
    (Path(mine[1]) / "experiment" / "other.yaml").write_text("# @package _global_\ntrainer:\n  steps: 4\n")
    (folder / "quiet.yaml").write_text("tensorboard: false\nwandb_project: mine\n")
    (found,) = warnings(*mine, "logger=quiet", "experiment=[mine,other]")
    assert found.startswith("logger=quiet sets logger.tensorboard=false, but experiment=mine")
