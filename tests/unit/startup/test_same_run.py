import pytest

from rlpack.checkpoint import commit
from rlpack.checkpoint.commit import new_checkpoint
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Config, Data, Model, Recipe, SFTWarmup, Trainer
from rlpack.startup.same_run import check_resumed, check_same_run


def resumed(run_dir, **sections):
    return Config(run_dir=str(run_dir), resume="auto", **sections)


def save(run_dir, step, phase="train", **changes):
    progress = {"phase": phase, "step": step}
    with new_checkpoint(run_dir / "checkpoints" / phase, step) as staging:
        fields = {"prompts": "a", "held_out": "b", "reference": None, "records": {}} | changes
        staging.commit({"config": Config().model_dump(mode="json"), "progress": progress} | fields)


def test_a_run_is_not_resumed_with_fewer_steps_than_are_done(tmp_path):
    check_resumed(resumed(tmp_path, trainer=Trainer(steps=1)))
    save(tmp_path, 30, phase="sft_warmup")
    check_resumed(resumed(tmp_path, trainer=Trainer(steps=1)))  # none of the recipe's own
    save(tmp_path, 4)
    check_resumed(resumed(tmp_path, trainer=Trainer(steps=4)))
    with pytest.raises(ConfigError, match=r"trainer.steps is 3, but the run in run_dir=.* has done 4 steps; set"):
        check_resumed(resumed(tmp_path, trainer=Trainer(steps=3)))


def test_another_seed_is_refused_by_the_newest_state_that_can_be_read(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 6)
    (tmp_path / "checkpoints/train/step-6/state.json").write_text("{}")  # resuming says that it is damaged
    with pytest.raises(ConfigError, match=r"seed is 2 and the checkpoint in run_dir=.* was written with 1"):
        check_resumed(resumed(tmp_path, seed=2))
    check_resumed(Config(run_dir=str(tmp_path), seed=2))  # without resume=auto, another check refuses the directory


def test_another_built_in_recipe_is_refused_by_its_name(tmp_path):
    save(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"recipe is ppo, and the .* was written with grpo; set recipe=grpo, or"):
        check_resumed(resumed(tmp_path, recipe=Recipe(target="rlpack.recipes.ppo")))


@pytest.mark.parametrize("changes", [{"config": None}, {"config": {"seed": 1}}, {"progress": {}}])
def test_a_state_with_other_fields_is_refused_by_its_version(tmp_path, changes):
    save(tmp_path, 4)
    save(tmp_path, 6, **changes)
    with pytest.raises(CheckpointError, match=r"step-6 has other fields .* written by rlpack"):
        check_resumed(resumed(tmp_path))


def test_a_newer_format_is_refused_and_no_older_checkpoint_is_looked_at(tmp_path, monkeypatch):
    save(tmp_path, 4)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "FORMAT", commit.FORMAT + 1)
        save(tmp_path, 6)
    with pytest.raises(CheckpointError, match=rf"step-6 was written by .* in format {commit.FORMAT + 1}; this is"):
        check_resumed(resumed(tmp_path))


def test_several_keys_that_differ_are_one_problem_and_an_empty_section_is_none():
    saved = Config(data=Data(generator={"train_size": 8})).model_dump(mode="json")
    with pytest.raises(ConfigError) as raised:
        check_same_run(saved, Config(seed=2, sft_warmup=SFTWarmup(steps=7)))
    (problem,) = raised.value.problems
    assert problem.startswith("3 keys differ from those that the checkpoint in run_dir=None was written with: ")
    assert "data.generator.train_size (unset, was 8), seed (2, was 1), sft_warmup.steps (7, was " in problem
    assert "repeat them, or choose another run_dir" in problem


def nested(key: str, value: object) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.lead", 1),
        ("rollout.publish", "in_flight"),
        ("actor.lora.rank", 8),
        ("critic.path", "folder"),
        ("critic.revision", "main"),
        ("actor.optimizer.name", "adamw_8bit"),
        ("critic.optimizer.freeze", ("embed",)),
        ("actor.optimizer.no_decay", ("norm",)),
        ("model.path", "folder"),
    ],
)
def test_a_value_that_determines_the_steps_or_the_state_has_to_stay(key, value):
    config = Config.model_validate(nested(key, value))
    check_same_run(config.model_dump(mode="json"), config)
    saved = Config().model_dump(mode="json")
    with pytest.raises(ConfigError, match=rf"{key} is .* and the checkpoint in .* was written with") as raised:
        check_same_run(saved, config)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("trainer.steps", 999), ("rollout.engine", "vllm"), ("actor.optimizer.learning_rate", 0.5)]
)
def test_a_value_that_a_resumed_run_can_change_is_accepted(key, value):
    check_same_run(Config().model_dump(mode="json"), Config.model_validate(nested(key, value)))


def test_a_run_of_a_version_without_a_tokenizers_revision_used_the_models(tmp_path):
    def check(tokenizer, own):
        model = Model(path="a/model", tokenizer=tokenizer, revision="main", tokenizer_revision=own)
        saved = Config(model=model).model_dump(mode="json")
        del saved["model"]["tokenizer_revision"]
        check_same_run(saved, Config(model=model))

    check("b/tokenizer", "main")
    check(str(tmp_path), None)
    check("a/model", None)
    check(None, None)
    with pytest.raises(ConfigError, match=r"set model\.tokenizer_revision as it was"):
        check("b/tokenizer", None)


@pytest.mark.parametrize(
    ("before", "now"), [("mine", "./mine"), ("{folder}/mine", "mine"), ("{folder}/gone/mine", "mine")]
)
def test_a_model_whose_path_is_spelled_otherwise_or_was_moved_is_the_same(tmp_path, monkeypatch, before, now):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    saved = Config(model=Model(path=before.format(folder=tmp_path))).model_dump(mode="json")
    check_same_run(saved, Config(model=Model(path=now)))


@pytest.mark.parametrize(("before", "now"), [("mine", "other"), ("{folder}/mine", "{folder}/other")])
def test_another_folder_of_a_model_is_refused(tmp_path, monkeypatch, before, now):
    (tmp_path / "mine").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    saved, resumed = (Config(model=Model(path=path.format(folder=tmp_path))) for path in (before, now))
    with pytest.raises(ConfigError, match=r"model\.path is '.*other' and the checkpoint .* was written with '.*mine'"):
        check_same_run(saved.model_dump(mode="json"), resumed)
