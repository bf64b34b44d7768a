import dataclasses
import errno
import re
import shlex
import sys
import threading
from datetime import datetime
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from rlpack.batch.errors import DataError
from rlpack.cli.main import main
from rlpack.cli.train import Job, compose_jobs, run, with_run_dirs
from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Config
from rlpack.installation import RAY_JOB
from rlpack.observe.errors import StandardOutputClosedError
from rlpack.startup.evaluated_model import run_config
from rlpack.startup.model_files import check_model_files
from rlpack.startup.same_run import check_same_run
from rlpack.user_code import Interrupted
from tests.builders import tiny_tokenizer


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Stand in for the recipes: what they were run with; `ran.fails` is raised by each, or by the one in `fails_in`."""

    class Ran(list):
        fails: BaseException | None = None
        fails_in: int | None = None

        def main(self, config: Config) -> None:
            self.append(config)
            if self.fails and self.fails_in in (None, len(self)):
                raise self.fails

    runs = Ran()
    for name in ("grpo", "sft"):
        recipe = ModuleType(f"rlpack.recipes.{name}")
        recipe.__spec__ = ModuleSpec(recipe.__name__, None)
        recipe.main = runs.main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"rlpack.recipes.{name}", recipe)
    monkeypatch.setattr("rlpack.cli.environment._targets", lambda *_: iter(()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runs


def test_a_command_runs_its_recipe_once_with_its_config(ran):
    assert main(["train", "recipe=sft", "trainer.steps=3"]) == 0
    assert len(ran) == 1
    assert ran[0].model_copy(update={"run_dir": None}) == compose(["recipe=sft", "trainer.steps=3"])


def test_a_mini_batch_over_the_rollout_batch_is_spoken_of_only_if_the_command_sets_it(ran, caplog):
    small = ["trainer.prompts_per_step=4", "trainer.group_size=8"]
    assert main(["train", *small]) == 0  # the preset has mini-batches of 64
    assert "mini_batch_size" not in caplog.text
    assert main(["train", *small, "trainer.mini_batch_size=64"]) == 0
    assert "trainer.mini_batch_size is 64: a rollout batch has only 32 sequences" in caplog.text


def test_composing_leaves_nothing_behind_and_does_not_change_directory(ran, tmp_path):
    main(["train"])
    assert (list(tmp_path.iterdir()), Path.cwd()) == ([], tmp_path)


def test_a_run_directory_is_named_after_time_and_recipe(ran, tmp_path):
    now = datetime(2026, 2, 3, 4, 5, 6)
    config = compose(["recipe=sft"])
    assert with_run_dirs([Job(config)], now)[0].config.run_dir == "runs/2026-02-03_04-05-06-sft"
    (tmp_path / "runs/2026-02-03_04-05-06-sft").mkdir(parents=True)
    assert with_run_dirs([Job(config)], now)[0].config.run_dir == "runs/2026-02-03_04-05-06-sft-2"


def test_a_recipe_gets_an_absolute_run_directory(ran, tmp_path):
    main(["train", "run_dir=here"])
    assert ran[0].run_dir == str(tmp_path / "here")


@pytest.fixture
def of_project(ran, tmp_path, monkeypatch):
    """Return the configuration of a run in a project's folder, with a model in it, and its recipe's one."""
    (tmp_path / "project" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    config = compose([f"run_dir={tmp_path}/here", "model=pretrained", "model.path=base", "model.tokenizer=./base"])
    assert run(config) == 0
    return config, ran[-1]


def test_a_recipe_gets_the_paths_of_models_as_given(of_project):
    config, of_recipe = of_project
    assert of_recipe == config


def test_a_local_run_is_resumed_as_a_submitted_job_with_the_same_overrides(of_project, ran, tmp_path, monkeypatch):
    config, before = of_project
    (tmp_path / "uploaded" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "uploaded")
    monkeypatch.setenv(RAY_JOB, "{}")
    assert run(config) == 0
    check_same_run(before.model_dump(mode="json"), ran[-1])


def test_the_models_of_a_run_are_found_in_its_project_after_that_was_moved(of_project, tmp_path, monkeypatch):
    state = {"config": of_project[1].model_dump(mode="json")}
    (tmp_path / "project").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    tiny_tokenizer().save_pretrained("base")
    Path("base/config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, "base/model.safetensors", metadata={"format": "pt"})
    check_model_files(run_config(state))


def test_a_run_directory_may_lie_in_the_home_directory(ran, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    main(["train", 'run_dir="~/mine"'])
    assert ran[0].run_dir == str(tmp_path / "home" / "mine")


def test_cfg_job_shows_the_config_and_runs_nothing(ran, capsys):
    assert main(["train", "seed=5", "--cfg", "job", "trainer.steps=3"]) == 0
    assert capsys.readouterr().out.startswith("recipe:\n  target: rlpack.recipes.grpo\nseed: 5\nrun_dir: null\n")
    assert ran == []


def test_a_sweep_runs_every_job_in_its_own_directory(ran, tmp_path):
    assert main(["train", "--multirun", "seed=1,2", "batching=packed,fixed"]) == 0
    assert [(config.seed, config.batching.mode) for config in ran] == [
        (1, "packed"), (1, "fixed"), (2, "packed"), (2, "fixed"),
    ]  # fmt: skip
    places = [Path(config.run_dir) for config in ran]
    assert [place.name for place in places] == ["0", "1", "2", "3"]
    assert {place.parent.parent for place in places} == {tmp_path / "runs"}


def test_the_jobs_of_a_sweep_that_name_one_run_dir_get_their_numbers_below_it(ran, tmp_path):
    main(["train", "run_dir=mine", "--multirun", "seed=1,2"])
    assert [config.run_dir for config in ran] == [str(tmp_path / "mine/0"), str(tmp_path / "mine/1")]


def test_a_sweep_whose_jobs_have_other_directories_leaves_none_of_its_own(ran, tmp_path):
    assert main(["train", "-m", "seed=1,2", "run_dir=all"]) == 0
    assert [Path(config.run_dir).relative_to(tmp_path) for config in ran] == [Path("all/0"), Path("all/1")]
    assert not (tmp_path / "runs").exists()


def test_a_command_for_another_attempt_can_be_pasted(ran, tmp_path, capsys):
    ran.fails = KeyboardInterrupt()
    run_dir = tmp_path / "Mine ü"
    (run_dir / "checkpoints" / "train" / "step-1").mkdir(parents=True)
    (run_dir / "checkpoints" / "train" / "step-1" / "COMMITTED").touch()
    assert run(compose([]).model_copy(update={"run_dir": str(run_dir), "resume": "auto"})) == 130
    (words,) = re.findall(r"same command with (.*) to resume", capsys.readouterr().err)
    again = compose_jobs(shlex.split(words))
    assert again[0].config.run_dir == str(run_dir)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+experiment=smoke"], "+experiment=smoke adds a second choice to the group; write experiment=smoke"),
        (["run_dir=2024"], "run_dir is 2024; it has to be text; put it in quotes, in a shell as 'run_dir=\"…\"'"),
        (["--config-dir", "a", "--config-dir", "b"], "--config-dir is given 2 times, but only the last would count"),
    ],
)
def test_a_mistake_has_a_way_out(ran, tmp_path, capsys, words, said):
    for name in "ab":
        (tmp_path / name).mkdir()
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_sweep_over_run_dirs_keeps_them(ran, tmp_path):
    main(["train", "run_dir=a,b", "--multirun"])
    assert [config.run_dir for config in ran] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_one_wrong_job_of_a_sweep_stops_all_before_the_first_starts(ran, capsys):
    assert main(["train", "-m", "seed=1,-2"]) == 2
    assert ran == []
    assert capsys.readouterr().err == "rlpack train: job 1 (seed=-2): seed is -2; it has to be at least 0\n"


@pytest.mark.parametrize(
    "wrong",
    [
        ["seed=1,-2"],
        ["trainer.stepz=1,2"],
        ["seed=1,2", "data=jsonl", "data.source=none.jsonl"],
        ["seed=1,2", "hydra.sweep.dir=mine/sweep", "data=jsonl", "data.source=none.jsonl"],
    ],
)
def test_a_refused_sweep_leaves_no_directory(ran, tmp_path, wrong):
    assert main(["train", "-m", *wrong]) in (2, 3)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_sweep_leaves_the_files_of_others(ran, tmp_path):
    (tmp_path / "mine" / "0").mkdir(parents=True)
    (tmp_path / "mine" / "0" / "metrics.jsonl").write_text("")
    assert main(["train", "-m", "seed=1,-2", "hydra.sweep.dir=mine"]) == 2
    assert (tmp_path / "mine" / "0" / "metrics.jsonl").exists()


def test_a_refused_sweep_leaves_a_directory_that_was_there_before(ran, tmp_path):
    (tmp_path / "mine" / "planned").mkdir(parents=True)
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "mine" / "planned")
    assert main(["train", "-m", "seed=1,-2", "hydra.sweep.dir=mine"]) == 2
    assert (tmp_path / "mine" / "planned").is_dir()
    assert (tmp_path / "mine" / "link").is_symlink()


def test_the_first_failing_job_ends_a_sweep(ran, capsys):
    ran.fails = DataError("prompts.jsonl:3: broken")
    assert main(["train", "-m", "seed=1,2"]) == 3
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError(["trainer.steps is odd"]), 2, "rlpack train: trainer.steps is odd\n"),
        (DataError("a.jsonl:3: broken JSON"), 3, "rlpack train: a.jsonl:3: broken JSON\n"),
        (ValueError("not ours"), 1, "Traceback"),
        (ZeroDivisionError("x"), 1, "ZeroDivisionError: x"),
        (Interrupted(), 130, ""),
        (KeyboardInterrupt(), 1, "recipe.target 'rlpack.recipes.grpo' raised KeyboardInterrupt"),
    ],
)
def test_a_failed_run_ends_with_the_code_of_its_cause(ran, capsys, error, code, said):
    ran.fails = error
    assert main(["train"]) == code
    assert said in capsys.readouterr().err


def test_a_recipe_whose_import_never_ends_is_a_configuration_error(ran, tmp_path, capsys, monkeypatch):
    ended = threading.Event()

    def load_main(target: str) -> None:
        assert ended.wait(30)

    monkeypatch.setattr("rlpack.cli.train.load_main", load_main)
    monkeypatch.setattr("rlpack.distributed.ray_connection.fits_this_machine", lambda placement: True)
    monkeypatch.setattr("rlpack.distributed.ray_connection.connect", lambda placement, preload: None)
    assert main(["train", "placement.start_timeout_s=0.2"]) == 2
    ended.set()
    assert "recipe.target=rlpack.recipes.grpo was not imported within placement.start_timeout_s=0.2 s" in (
        capsys.readouterr().err
    )
    assert ran == []


def test_an_interrupted_run_is_said_to_go_on_only_where_it_saved_something(ran, tmp_path, capsys):
    ran.fails = Interrupted()
    assert main(["train", "run_dir=mine"]) == 130
    assert capsys.readouterr().err == "rlpack train: interrupted; nothing was saved yet\n"
    marker = tmp_path / "mine" / "checkpoints" / "sft_warmup" / "step-3" / "COMMITTED"
    marker.parent.mkdir(parents=True)
    marker.touch()
    assert main(["train", "run_dir=mine", "resume=auto"]) == 130
    assert "run the same command with run_dir=mine resume=auto to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "folder", "resumed"),
    [
        (["hydra.sweep.dir=all"], "all/1", "run_dir={here}/all resume=auto"),
        (["run_dir=all"], "all/1", "resume=auto"),
        (["run_dir=all-${seed}"], "all-2", "resume=auto"),
    ],
)
def test_an_interrupted_sweep_is_resumed_as_a_whole_by_what_is_said(ran, tmp_path, capsys, words, folder, resumed):
    resumed = resumed.format(here=tmp_path)
    ran.fails, ran.fails_in = Interrupted(), 2
    command = ["train", "--multirun", "seed=1,2,3", *words]
    assert main(command) == 130
    assert f"; run the same command with {resumed} to resume from the last" in capsys.readouterr().err
    first = [config.run_dir for config in ran]
    assert first[1] == str(tmp_path / folder)
    ran.clear()
    ran.fails = None
    assert main([*(word for word in command if not word.startswith("hydra")), *resumed.split()]) == 0
    assert [config.run_dir for config in ran][:2] == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.stepz=1"], "did you mean trainer.steps?"),
        (["model=tinny"], "did you mean model=tiny?"),
        (["seed"], "'seed' is not an override; write key=value"),
        (["trainer.steps", "=", "5"], "'trainer.steps' is not an override; write trainer.steps=5, without spaces"),
        (["trainer.steps=", "5"], "'5' is not an override; write trainer.steps=5, without spaces"),
        (
            ["rollout.stop_token_ids=[3,", "4]", "seed=1"],
            "'4]' is not an override; a value with spaces needs quotes, in a shell as 'rollout.stop_token_ids=[3, 4]'",
        ),
        (["--seed", "3"], "unknown option --seed; overrides take no dashes: write seed=…"),
        (
            ["--steps=3"],
            "unknown option --steps; overrides take no dashes: steps is not a key; did you mean trainer.steps?",
        ),
        (
            ["--num-generations", "8"],
            "num_generations is not a key; that is TRL's name; here it is trainer.group_size",
        ),
        (["hydra/launcher=joblib"], "hydra/launcher=joblib is not supported"),
        (["--config-dir", "nowhere"], "not found"),
        (["resume=auto"], "set run_dir"),
        (["run_dir=file"], "run_dir=file is not a directory; choose another run_dir"),
        (["run_dir=file/below"], "choose another run_dir"),
        (["run_dir=old"], "run_dir=old already contains a run"),
    ],
)
def test_what_is_wrong_before_a_run_is_one_message_and_code_2(ran, tmp_path, capsys, arguments, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("")
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.err.count("rlpack train: "), said.out, ran) == (1, "", [])


def test_a_run_directory_that_holds_a_run_is_resumed_when_asked(ran, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("")
    assert main(["train", "run_dir=old", "resume=auto"]) == 0


def test_a_missing_data_file_is_a_data_error(ran, capsys):
    assert main(["train", "data=jsonl", "data.source=prompts.jsonl", "data.validation_source=prompts.jsonl"]) == 3
    assert "data.source is 'prompts.jsonl', but there is no such file in" in capsys.readouterr().err


@pytest.mark.parametrize(("run_dir", "code"), [([], 2), (["run_dir=here"], 2), (["run_dir={absolute}"], 0)])
def test_a_run_directory_inside_a_ray_job_has_to_be_absolute(ran, tmp_path, monkeypatch, run_dir, code):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert main(["train", *(word.format(absolute=tmp_path / "x") for word in run_dir)]) == code


def test_a_users_own_experiment_is_found_and_its_mistakes_are_named(ran, tmp_path, capsys):
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "good.yaml").write_text("# @package _global_\nseed: 9\n")
    assert main(["train", "--config-dir", "conf", "experiment=good"]) == 0
    assert ran[0].seed == 9
    for text, message in (
        ("# @package _global_\ntrainer:\n  stepz: 9\n", "trainer.stepz is not a key"),
        ("# @package _global_\nseed: 1\nseed: 2\n", "duplicate key seed"),
        ("# @package _global_\ntrainer:\n\tsteps: 2\n", "found character '\\t' that cannot start any token"),
        ("# @package _global_\nseed: [1\n", "bad.yaml"),
        ("# @package _global_\na: &a [*a]\n", "bad.yaml holds more than 10,000 values"),
        ("seed: 9\n", "conf/experiment/bad.yaml lacks the line `# @package _global_`; add it as the first line"),
        ("defaults:\n  - override /model: small\n", "conf/experiment/bad.yaml lacks the line `# @package _global_`"),
        ("seed: 9\n# @package _global_\n", "conf/experiment/bad.yaml lacks the line `# @package _global_`"),
    ):
        (folder / "bad.yaml").write_text(text)
        assert main(["train", "--config-dir=conf", "experiment=bad"]) == 2
        assert message in capsys.readouterr().err


def test_a_users_preset_of_another_group_needs_the_header_only_for_keys_outside_its_group(ran, tmp_path, capsys):
    (tmp_path / "conf" / "data").mkdir(parents=True)
    mine = tmp_path / "conf" / "data" / "mine.yaml"
    mine.write_text("max_prompt_tokens: 100\n")
    assert main(["train", "--config-dir", "conf", "data=mine", "sft_warmup.steps=0"]) == 0
    assert ran[0].data.max_prompt_tokens == 100
    mine.write_text("data:\n  max_prompt_tokens: 100\n")
    assert main(["train", "--config-dir", "conf", "data=mine"]) == 2
    assert "conf/data/mine.yaml lacks the line `# @package _global_`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override", ["rollout.engine={}", "run_dir={}", "data.sourse={}", "reward.function={}", "model={}"]
)
def test_a_value_of_50_kb_is_shortened_in_the_message(ran, capsys, override):
    for value in ("a" * 50_000, "'" + "a " * 25_000 + "'"):
        main(["train", override.format(value)])
        said = capsys.readouterr().err
        assert override.partition("=")[0] in said
        assert len(said) < 3000


@pytest.mark.parametrize("length", [300, 5_000, 50_000])
def test_a_choice_longer_than_any_files_name_is_answered_with_the_choices(ran, capsys, length):
    assert main(["train", f"model={'a' * length}"]) == 2
    heard = capsys.readouterr().err
    assert re.search(r"model=a.* is not a choice; model has: pretrained, small, tiny; for a model's folder or", heard)


@pytest.mark.parametrize("key", ["run_dir", "data.source", "data.validation_source", "model.path", "model.tokenizer"])
def test_a_name_that_no_file_can_have_is_an_error_of_its_key(ran, capsys, key):
    assert main(["train", f"{key}=/some/{'a' * 300}"]) == 2
    assert f"{key} is '/some/aaa" in (said := capsys.readouterr().err)
    assert "a name has 300 bytes; a file's name has at most 255" in said


def test_what_hydra_says_about_help_comes_from_this_project(ran, capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    assert "recipe: cispo, dapo, dr_grpo, gmpo, grpo, gspo, " in capsys.readouterr().out


def test_a_job_is_plain_data():
    names = [field.name for field in dataclasses.fields(Job)]
    assert names == ["config", "given", "number", "sweep_dir", "overrides", "overridden", "resume_dir"]


def test_a_run_whose_output_nobody_reads_any_more_ends_quietly_as_by_a_signal(ran, capfd):
    ran.fails = StandardOutputClosedError(errno.EPIPE, "closed")
    with pytest.raises(SystemExit) as ended:
        main(["train", "run_dir=new"])
    assert ended.value.code == 141
    assert "closed" not in capfd.readouterr().err
    assert not Path("new").exists()
