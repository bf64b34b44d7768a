import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import rlpack
from rlpack.cli.evaluate import _base_values, evaluation_config
from rlpack.cli.main import main
from rlpack.config.compose import compose, compose_evaluation
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Rollout
from rlpack.installation import RAY_JOB
from rlpack.models.errors import ModelError
from rlpack.recipes.evaluate import evaluate_model
from rlpack.startup.evaluated_model import EvaluatedModel
from rlpack.startup.evaluation_checks import check_evaluation
from tests.builders import MODEL, tiny_config, tiny_tokenizer

ROOT = Path(rlpack.__file__).parents[1]
ROWS = "".join(json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n" for number in range(4))
JUDGE, SERVED = "rlpack.workers.judge:JudgeWorker", "rlpack.workers.served_reward_model:ServedRewardModelWorker"
JSONL = ("data=jsonl", "data.source=rows.jsonl")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = tiny_tokenizer()
    settings = {name: value for name, value in MODEL.items() if name != "model_type"}
    config = AutoConfig.for_model("qwen2", **settings, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    """Return the working directory, with the folder of a model and a file of prompts."""
    (tmp_path / "model").mkdir()
    for path in saved.iterdir():
        os.link(path, tmp_path / "model" / path.name)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


def refused(capsys, *arguments, code=2):
    """Return the one message of a command that changes nothing."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    assert main(["evaluate", *arguments]) == code
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    shown = capsys.readouterr().err
    assert shown.count("rlpack evaluate: ") == 1
    assert "Traceback" not in shown
    return shown


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluate.samples=0"], "evaluate.samples is 0; it has to be at least 1"),
        (["evaluate.samples=4", "evaluate.pass_at=[1,5]"], "evaluate.pass_at holds 5, over evaluate.samples=4"),
        (["evaluate.pass_at=[0]"], "evaluate.pass_at.0 is 0; it has to be at least 1"),
        (["evaluate.sampels=4"], "did you mean evaluate.samples?"),
        (["rollout.temprature=1"], "did you mean rollout.temperature?"),
        (["data=jsnl"], "did you mean data=jsonl?"),
        (["trainer.steps=3"], "trainer.steps has no effect on rlpack evaluate"),
        (["recipe=ppo"], "recipe has no effect on rlpack evaluate, whose groups are data, reward"),
        (["model=tiny"], "model is set by the model or run that comes first"),
        (["model.path=x"], "model.path is set by the model or run that comes first"),
        (["run_dir=x"], "set evaluate.output_dir"),
        (["judge.weight=2"], "judge.weight has no effect on rlpack evaluate while reward functions score; leave it"),
        (["judge.url=http://a/v1"], f"judge score: roles.reward.target={JUDGE}"),
        ([f"roles.judge.target={JUDGE}"], "roles.judge.target has no effect on rlpack evaluate, whose roles are"),
        ([f"roles.reward.target={JUDGE}"], "judge.url is null, but the role reward needs it"),
        (["resume=auto"], "resume has no effect"),
        (["evaluate.checkpoint=x"], "--checkpoint N"),
        (["checkpoint=2"], "its checkpoint's step with --checkpoint N"),
        (["step=2"], "its checkpoint's step with --checkpoint N"),
        (["--samples=4"], "overrides take no dashes: write evaluate.samples=…"),
        (["--run"], "unknown option --run; the model or run is the first argument: rlpack evaluate "),
        (["--chekpoint=4"], "did you mean --checkpoint?"),
        (["seed=1,2"], "seed=1,2 has several values"),
        (["samples"], "'samples' is not an override"),
        (["evaluate.output_dir="], "evaluate.output_dir"),
        (["data.validation_source="], "data.validation_source is '', which is blank; set it, or null for data.source"),
        (["evaluate.output_dir=model"], "which has unrelated files"),
        (["reward.function=absent_rewards:score"], "there is no module absent_rewards"),
        (["reward.function=rlpack.rewards.functions:final_anser"], "has no final_anser"),
        (["reward.function=rlpack.rewards.code_execution:unit_tests", "reward.subprocesses=1"], "needs 'tests'"),
        (["placement=eight_gpus"], "GPU"),
        (["rollout.stop_token_ids=[999]"], "rollout.stop_token_ids holds 999"),
    ],
)
def test_a_wrong_override_is_one_message_and_changes_nothing(folder, capsys, overrides, words):
    assert words in refused(capsys, "model", *JSONL, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words", "code"),
    [
        (["data=jsonl", "data.source=missing.jsonl"], "there is no such file", 3),
        (["data=jsonl", "data.source=bad.jsonl"], "bad.jsonl", 3),
        ([*JSONL, "data.prompt_column=question"], "question", 3),
        (["data=jsonl"], "data.source can't be null", 2),
    ],
)
def test_wrong_data_is_one_message(folder, capsys, overrides, words, code):
    (folder / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    assert words in refused(capsys, "model", *overrides, code=code)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "there is no config.json in it"),
        ("model.safetensors", "there is no model.safetensors and no"),
        ("tokenizer", "there is no tokenizer in it"),
    ],
)
def test_an_incomplete_folder_is_one_message(folder, capsys, missing, words):
    for path in (folder / "model").glob(f"{missing}*"):
        path.unlink()
    assert words in refused(capsys, "model", *JSONL)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("./modl", "did you mean modl"),
        ("rows.jsonl", "'rows.jsonl' is not a folder"),
        ("folder/absent", "'folder/absent' is not a folder; give a model's folder, the directory of a run, or a hub"),
        ("folder/empty", "'folder/empty' holds neither a model (config.json) nor a run (config.yaml); give a model's"),
        ("folder", "nor a run (config.yaml); give one of the folders in it: folder/mine"),
        ("nothing-like-it", "there is no such folder"),
    ],
)
def test_a_missing_model_is_one_message(folder, capsys, given, words):
    for name in ("mine", "empty"):
        (folder / "folder" / name).mkdir(parents=True)
    (folder / "folder" / "mine" / "config.yaml").touch()
    assert words.replace("modl", "model") in refused(capsys, given, *JSONL)


def test_an_override_in_place_of_the_model_is_a_usage_error(folder, capsys):
    with pytest.raises(SystemExit) as left:
        main(["evaluate", "data=jsonl"])
    assert left.value.code == 2
    assert "the model or run comes first" in capsys.readouterr().err


def test_a_model_is_evaluated_on_the_prompts_of_the_command(folder):
    config = evaluation_config("model", None, [*JSONL, "evaluate.samples=3"])
    assert (config.data.source, config.data.validation_source) == ("rows.jsonl", "rows.jsonl")
    assert config.model.path == str(folder / "model")
    assert config.run_dir is not None
    assert config.run_dir.startswith("evaluations/model-")
    assert evaluation_config("./model", None, [*JSONL, "evaluate.samples=3"]).run_dir == config.run_dir
    held_out = evaluation_config("model", None, [*JSONL, "data.validation_source=./rows.jsonl"])
    assert held_out.data.source == "./rows.jsonl"  # the overrides of rlpack train mean the same here


def test_a_run_that_published_in_flight_is_evaluated_with_weights_that_stay(tmp_path):
    in_flight = ("rollout=vllm", "rollout.publish=in_flight", "rollout.kv_cache=keep", "trainer.lead=2")
    state = {"config": compose([*in_flight, "placement=two_pools"]).model_dump(mode="json")}
    run = EvaluatedModel("mine-step-2", checkpoint=tmp_path, state=state)
    rollout = compose_evaluation([], _base_values(run, [])).rollout
    assert (rollout.engine, rollout.publish, rollout.kv_cache) == ("vllm", "drain", "clear")
    given = ["rollout.publish=in_flight"]  # it is refused, instead of ignored
    with pytest.raises(ConfigError, match=r"rollout\.publish is in_flight, .* or rollout\.publish=drain"):
        compose_evaluation(given, _base_values(run, given))


def test_an_evaluation_loads_the_weights_that_a_run_only_publishes(tmp_path):
    given = ("rollout=vllm", "+rollout.vllm.load_format=dummy", "+rollout.vllm.block_size=64")
    run = EvaluatedModel("m", checkpoint=tmp_path, state={"config": compose(given).model_dump(mode="json")})
    assert compose_evaluation([], _base_values(run, [])).rollout.vllm == {"block_size": 64}


def test_a_run_with_vllm_is_evaluated_with_hf_by_one_override(tmp_path):
    sizes = (
        "rollout.kv_cache_gb=2",
        "+rollout.vllm.block_size=64",
        "rollout.deterministic=true",
        "rollout.compile=true",
    )
    given = ("rollout=vllm", "rollout.dtype=bf16", "rollout.temperature=0.7", *sizes)
    run = EvaluatedModel("m", checkpoint=tmp_path, state={"config": compose(given).model_dump(mode="json")})
    with_hf = ["rollout.engine=hf"]
    rollout = compose_evaluation(with_hf, _base_values(run, with_hf)).rollout
    assert (rollout.engine, rollout.kv_cache_gb, rollout.vllm, rollout.dtype) == ("hf", None, {}, None)
    assert rollout.temperature == 0.7
    kept = ["rollout.engine=vllm", "rollout.top_k=4"]
    assert compose_evaluation(kept, _base_values(run, kept)).rollout.kv_cache_gb == 2


@pytest.mark.parametrize("target", [JUDGE, SERVED])
def test_a_run_whose_reward_is_a_server_is_evaluated_with_it(tmp_path, target):
    server = (f"roles.reward.target={target}", "judge.url=http://a/v1", "judge.model=m", "judge.weight=0.5")
    run = EvaluatedModel("m", checkpoint=tmp_path, state={"config": compose(server).model_dump(mode="json")})

    def judge_of(*overrides):
        return compose_evaluation(overrides, _base_values(run, overrides)).judge

    judge = judge_of()
    assert (judge.url, judge.model, judge.weight) == ("http://a/v1", "m", 0.5)
    assert judge_of("judge.url=http://b/v1").url == "http://b/v1"
    assert judge_of(f"roles.reward.target={compose().roles['reward'].target}").url is None


def test_a_model_is_evaluated_with_a_judge(folder):
    judge = (f"roles.reward.target={JUDGE}", "judge.url=http://a/v1", "judge.model=m")
    config = evaluation_config("model", None, [*JSONL, *judge])
    assert (config.judge.url, config.roles["reward"].target) == ("http://a/v1", JUDGE)
    assert evaluation_config("model", None, [*JSONL, *judge, "judge.model=n"]).run_dir != config.run_dir


@pytest.mark.parametrize("override", ["reward.function=rlpack.rewards.functions:exact_match", "reward.timeout_s=3"])
def test_reward_functions_that_a_judge_replaces_are_refused(folder, capsys, override):
    judge = (f"roles.reward.target={JUDGE}", "judge.url=http://a/v1", "judge.model=m")
    key = override.partition("=")[0]
    text = (
        f"{key} has no effect on rlpack evaluate while JudgeWorker scores (roles.reward.target); leave it out, or let"
    )
    shown = refused(capsys, "model", *JSONL, *judge, override)
    assert text in shown
    assert "reward functions score: roles.reward.target=rlpack.workers.reward:RewardWorker" in shown


def test_the_judge_of_another_role_than_the_reward_is_left_out(tmp_path):
    server = (f"roles.judge.target={JUDGE}", "judge.url=http://a/v1", "judge.model=m")
    run = EvaluatedModel("m", checkpoint=tmp_path, state={"config": compose(server).model_dump(mode="json")})
    assert compose_evaluation([], _base_values(run, [])).judge.url is None


def test_an_evaluation_of_random_weights_is_refused():
    config = tiny_config(rollout=Rollout(engine="vllm", vllm={"load_format": "dummy"}))
    with pytest.raises(ModelError, match="load_format is 'dummy', with which vLLM samples from random weights"):
        check_evaluation(config, None)


def test_a_runs_permission_for_its_models_code_is_that_of_its_evaluation(tmp_path):
    hub = ("model=pretrained", "model.path=owner/mine", "model.revision=0a1b2c3d")

    def evaluated(run, *overrides):
        state = {"config": compose([*hub, *run]).model_dump(mode="json")}
        model = EvaluatedModel("mine-step-2", checkpoint=tmp_path, state=state)
        config = compose_evaluation(overrides, _base_values(model, overrides))
        assert config.model.path == str(tmp_path)
        return config.model.trust_remote_code, config.model.revision

    assert evaluated(["model.trust_remote_code=true"]) == (True, "0a1b2c3d")
    overrides = ["model.trust_remote_code=false", "model.revision=null"]
    assert evaluated(["model.trust_remote_code=true"], *overrides) == (False, None)
    assert evaluated([]) == (False, None)  # the exported folder has no revisions


@pytest.mark.parametrize("command", [("evaluate", "model"), ("train",)])
def test_a_deleted_working_directory_is_one_message(tmp_path, monkeypatch, capsys, command):
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    try:
        assert main(list(command)) == 2
    finally:
        os.chdir(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"rlpack {command[0]}: the working directory no longer exists; change to another one"


def test_the_section_is_no_section_of_rlpack_train(folder):
    with pytest.raises(ConfigError, match=r"evaluate\.\* belongs to rlpack evaluate"):
        compose(["evaluate.samples=3"])


@pytest.mark.parametrize(
    "arguments", [["missing/model"], ["model", "evaluate.samples=0"], ["model", "data=jsonl", "data.source=no.jsonl"]]
)
def test_bad_input_ends_before_torch_or_ray_is_imported(folder, arguments):
    answer = subprocess.run(
        [sys.executable, "-m", "rlpack", "evaluate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"},
    )
    lines = answer.stderr.splitlines()
    assert answer.returncode in (2, 3)
    assert len([line for line in lines if not line.startswith("import time:")]) == 1
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "rlpack.cli.evaluate" in imported
    assert imported.isdisjoint({"torch", "ray", "transformers", "numba"})


@pytest.mark.parametrize(("environment", "of_ranks"), [({}, "{folder}/model"), ({RAY_JOB: "{{}}"}, "./model")])
def test_ranks_get_the_absolute_path_of_the_tokenizer_unless_in_a_job(folder, monkeypatch, environment, of_ranks):
    class StartedError(Exception):
        """Ends the evaluation where its roles would start."""

    def start_roles(cluster, config, names, settings):
        raise StartedError(settings[0].model.tokenizer)

    config = evaluation_config("model", None, [*JSONL, "model.tokenizer=./model"])
    assert config.model.tokenizer == "./model"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Path(config.run_dir or "").mkdir(parents=True)
    monkeypatch.setattr(evaluate_model, "Cluster", lambda *_: nullcontext())
    monkeypatch.setattr(evaluate_model, "start_roles", start_roles)
    with pytest.raises(StartedError) as started:
        evaluate_model.main(config)
    assert str(started.value) == of_ranks.format(folder=folder)
