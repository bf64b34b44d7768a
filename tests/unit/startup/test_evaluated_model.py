import json
import re
import shutil
from pathlib import Path

import pytest

from rlpack.checkpoint.commit import new_checkpoint
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.model_folder import new_model_folder
from rlpack.checkpoint.validity import fault_of
from rlpack.cli.evaluate import _base_values
from rlpack.config.compose import compose, compose_evaluation
from rlpack.config.schema import Model
from rlpack.models.errors import ModelError
from rlpack.observe.errors import EvaluationError
from rlpack.startup import evaluated_model, evaluation_checks
from rlpack.startup.evaluated_model import find_model, run_config, run_values, with_dtype_of
from tests.builders import tiny_config

PROGRESS = {"phase": "train", "step": 0}
STATE = dict.fromkeys(("prompts", "held_out", "reference", "records"))


def save(root: Path, step: int, config=None) -> Path:
    with new_checkpoint(root, step) as staging:
        (staging.path / "actor").mkdir()
        (staging.path / "actor" / "weights").write_bytes(b"weights")
        staging.commit(STATE | {"progress": PROGRESS, "config": (config or compose()).model_dump(mode="json")}, keep=9)
    return root / f"step-{step}"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs" / "mine" / "checkpoints" / "train"
    for step in (2, 4):
        save(root, step)
    return root.parents[1]


def damage(run, step):
    (run / f"checkpoints/train/step-{step}/actor/weights").write_bytes(b"wheights")


def contents(run):
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_a_run_stands_for_its_newest_sound_checkpoint_and_nothing_is_written(run):
    assert find_model("runs/mine", None).checkpoint == run / "checkpoints/train/step-4"
    damage(run, 4)
    before = contents(run)
    found = find_model("runs/mine", None)
    assert (found.checkpoint, found.name) == (run / "checkpoints/train/step-2", "mine-step-2")
    assert contents(run) == before


def test_a_step_selects_a_checkpoint(run):
    for choice in ("2", "train/2"):
        assert find_model(str(run), choice).checkpoint == run / "checkpoints/train/step-2"
    with pytest.raises(EvaluationError, match=r"no training checkpoint of step 3; set .* it has: 4, 2$"):
        find_model("runs/mine", "3")


@pytest.mark.parametrize("choice", ["", "-1", "step-2", "last", "warmup/2", "2/train", "\u0662"])
def test_what_is_no_step_is_an_error_with_examples(run, choice):
    with pytest.raises(
        EvaluationError, match=r"--checkpoint is '.*'; give a step, such as 4, or train/4 or sft_warmup"
    ):
        find_model("runs/mine", choice)


def test_a_damaged_checkpoint_that_is_asked_for_is_an_error_that_says_what_is_wrong(run):
    damage(run, 4)
    with pytest.raises(
        CheckpointError, match=r"step-4: .*weights.*choose another with --checkpoint \(there are 4, 2\)"
    ):
        find_model("runs/mine", "4")


def test_a_checkpoint_that_its_run_deletes_while_it_is_verified_is_not_called_damaged(run, monkeypatch):
    def deleting(folder):
        shutil.rmtree(folder)
        return fault_of(folder)

    monkeypatch.setattr(evaluated_model, "fault_of", deleting)
    with pytest.raises(CheckpointError, match="train/step-2: the run has since deleted it; restore"):
        find_model("runs/mine", "2")


def test_a_newer_damaged_checkpoint_is_skipped_with_a_warning_that_says_what_is_wrong(run, caplog):
    damage(run, 4)
    find_model("runs/mine", None)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(r"a newer checkpoint is skipped: .*/train/step-4: .*weights", record.getMessage())


def test_a_checkpoint_of_the_warm_up_is_evaluated_in_place_of_the_trainings_only_if_it_is_named(run, caplog):
    warm_up = save(run / "checkpoints" / "sft_warmup", 3)
    save(warm_up.parent, 4)
    with pytest.raises(EvaluationError, match=r"no training checkpoint of step 3; .*sft_warmup/4, sft_warmup/3$"):
        find_model("runs/mine", "3")  # train/step-3 was pruned
    assert find_model("runs/mine", "4").checkpoint == run / "checkpoints/train/step-4"
    damage(run, 2)
    damage(run, 4)
    with pytest.raises(CheckpointError, match=r"step-4: .*; .*step-2: .*there are 4, 2, sft_warmup/4"):
        find_model("runs/mine", None)
    assert not caplog.records
    assert find_model("runs/mine", "sft_warmup/3").checkpoint == warm_up


@pytest.mark.parametrize(
    ("of_run", "overrides", "dtype"),
    [
        (["rollout=vllm", "actor.precision=bf16"], [], "bf16"),
        (["rollout=vllm"], [], "fp32"),
        (["rollout=vllm", "actor.precision=bf16", "rollout.dtype=fp32"], [], "fp32"),
        (["rollout=vllm", "rollout.dtype=bf16"], [], "bf16"),
        (["rollout=vllm", "actor.precision=bf16"], ["rollout=vllm"], "bf16"),
        (["rollout=vllm", "actor.precision=bf16"], ["rollout.dtype=fp32"], "fp32"),
        (["rollout=vllm", "actor.precision=bf16"], ["rollout.engine=hf"], None),
        (["actor.precision=bf16"], ["rollout.engine=vllm"], "bf16"),
    ],
)
def test_vllm_generates_in_the_type_of_the_run_unless_the_command_names_one(tmp_path, of_run, overrides, dtype):
    root = tmp_path / "checkpoints" / "train"
    save(root, 1, compose(of_run))
    evaluated = find_model(str(tmp_path), None)
    assert evaluated.state is not None
    config = compose_evaluation(overrides, _base_values(evaluated, overrides))
    assert with_dtype_of(run_config(evaluated.state), config).rollout.dtype == dtype


def test_a_run_in_its_warm_up_stands_for_the_warm_ups_newest(tmp_path):
    save(tmp_path / "checkpoints" / "sft_warmup", 7)
    for choice in (None, "7", "sft_warmup/7"):
        assert find_model(str(tmp_path), choice).checkpoint == tmp_path / "checkpoints/sft_warmup/step-7"
    with pytest.raises(EvaluationError, match=r"no training checkpoint of step 7; .*: sft_warmup/7$"):
        find_model(str(tmp_path), "train/7")


def test_a_run_without_a_checkpoint_names_its_model_if_there_is_one(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(EvaluationError, match="has no checkpoint; wait for its first"):
        find_model(str(tmp_path), None)
    (tmp_path / "model").mkdir()
    with pytest.raises(EvaluationError, match=f"or evaluate {tmp_path}/model"):
        find_model(str(tmp_path), None)


def test_what_is_no_run_is_a_model_and_has_no_checkpoints(run, tmp_path):
    with new_model_folder(tmp_path / "model") as staging:
        staging.mkdir()
        (staging / "config.json").write_text("{}")
    assert find_model("model", None).path == str(tmp_path / "model")
    assert find_model("Qwen/Qwen3-0.6B", None).path == "Qwen/Qwen3-0.6B"
    with pytest.raises(ModelError, match="--checkpoint 1 needs the directory of a run"):
        find_model("model", "1")
    with pytest.raises(ModelError, match=r"'runs/mien' is not a folder; did you mean runs/mine\?"):
        find_model("runs/mien", None)
    with pytest.raises(ModelError, match=r"rlpack evaluate .*/runs/mine --checkpoint 4"):
        find_model("runs/mine/checkpoints/train/step-4", None)
    reference = tmp_path / "runs" / "mine" / "checkpoints" / "reference" / "step-0"
    reference.mkdir(parents=True)
    (reference / "COMMITTED").touch()
    with pytest.raises(ModelError, match="is what a run stores of its reference, which can't be evaluated; give the"):
        find_model(str(reference), None)


def test_an_evaluation_takes_over_what_its_run_was_configured_with(tmp_path):
    config = compose(
        [
            *("seed=9", "rollout.temperature=0.5", "reward=exact_match", "placement.pools.main.ranks=1"),
            *("+placement.pools.big.ranks=3", "placement.roles.rollout=big", "+placement.pools.other.ranks=1"),
            *("roles.judge.target=mine:Judge", "+placement.roles.judge=other", "algorithm.kl_coef=0.1"),
            *("data=jsonl", "data.source=train.jsonl", "data.validation_source=held_out.jsonl", "data.prompt_column=q"),
        ]
    )
    state = json.loads((save(tmp_path / "checkpoints" / "train", 1, config) / "state.json").read_text())
    model = {"model": compose().model_dump(mode="json")["model"] | {"path": "m", "config": {}}}
    evaluated = compose_evaluation([], run_values(state) | model)
    assert (evaluated.seed, evaluated.rollout.temperature) == (9, 0.5)
    assert evaluated.reward.function.endswith(":exact_match")
    assert (evaluated.data.source, evaluated.data.validation_source) == ("held_out.jsonl", "held_out.jsonl")
    assert evaluated.data.prompt_column == "q"
    assert {name: pool.ranks for name, pool in evaluated.placement.pools.items()} == {"big": 3, "main": 1}
    assert "judge" not in evaluated.roles
    assert evaluated.algorithm.kl_coef == 0
    assert (
        compose_evaluation(["data.source=other.jsonl"], run_values(state) | model).data.validation_source
        == "other.jsonl"
    )
    assert run_config(state).model == config.model


@pytest.mark.parametrize(
    ("overrides", "held_out"),
    [
        ((), ("a/b", "easy")),
        (("data.source=a/b",), ("a/b", "easy")),
        (("data.source=c/d",), ("c/d", None)),
        (("data.validation_source=c/d",), ("c/d", None)),
        (("data.source=c/d", "data.subset=main"), ("c/d", "main")),
        (("data.source=c/d", "data.subset=easy"), ("c/d", "easy")),
        (("data.source=c/d", "data.validation_subset=main"), ("c/d", "main")),
        (("data.source=x.jsonl",), ("x.jsonl", None)),
        (("data=jsonl", "data.source=x.jsonl"), ("x.jsonl", None)),
    ],
)
def test_the_subset_of_a_runs_dataset_is_that_of_no_other(tmp_path, overrides, held_out):
    config = compose(["data.source=a/b", "data.subset=main", "data.validation_subset=easy"])
    save(tmp_path / "checkpoints" / "train", 1, config)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").touch()
    evaluated = compose_evaluation(overrides, _base_values(find_model(str(tmp_path), None), overrides))
    assert (evaluated.data.source, evaluated.data.subset) == held_out
    assert evaluated.data.held_out == held_out


def test_a_run_of_a_version_without_a_tokenizers_revision_is_evaluated_with_the_models():
    model = {"path": "a/model", "tokenizer": "b/tokenizer", "revision": "main"}
    saved = compose(["model=pretrained", *(f"model.{key}={value}" for key, value in model.items())])
    config = saved.model_dump(mode="json")
    del config["model"]["tokenizer_revision"]
    assert run_config({"config": config}).model.tokenizer_revision == "main"


def test_a_base_model_that_was_moved_is_named_with_what_to_do():
    run = tiny_config(model=Model(path="/gone/base"))
    with pytest.raises(
        ModelError, match=r"the run's model\.path is '/gone/base', .* any more; move it back or link it"
    ):
        evaluation_checks._check_models_of_run(run)
