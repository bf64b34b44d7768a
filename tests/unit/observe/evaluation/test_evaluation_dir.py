from pathlib import Path

import pytest
import yaml

from rlpack.config.recipes import EVALUATE_TARGET, config_class
from rlpack.observe.errors import EvaluationError
from rlpack.observe.evaluation.evaluation_dir import (
    ENGINES,
    IDENTITY,
    EngineFailures,
    arguments_of,
    check_output_dir,
    default_output_dir,
    open_evaluation,
    other_evaluation,
)

MODEL = {"path": "model", "config": {}, "tokenizer": None, "revision": None, "trust_remote_code": False}
HASHES = {"prompts": "1", "model": "2"}


def config_of(*overrides):
    values = config_class(EVALUATE_TARGET)().model_dump(mode="json") | {"model": MODEL}
    for key, _, value in (override.partition("=") for override in overrides):
        *sections, name = key.split(".")
        below = values
        for section in sections:
            below[section] = dict(below[section])
            below = below[section]
        below[name] = yaml.safe_load(value)
    return config_class(EVALUATE_TARGET).model_validate(values)


def opened(folder, *overrides, hashes=HASHES):
    open_evaluation(folder, arguments_of(config_of(*overrides)), hashes)


@pytest.mark.parametrize(
    "override",
    [
        *("seed=2", "evaluate.samples=3", "evaluate.greedy=false", "rollout.dtype=bf16"),
        *("evaluate.prompts_per_part=2", "rollout.temperature=0.5", "rollout.max_num_seqs=8", "model.tokenizer=other"),
        *("reward.function=mine:score", "data.max_prompt_tokens=9", "placement.pools.main.ranks=1"),
        *("roles.reward.target=mine:Reward", "data.validation_split=test"),
    ],
)
def test_a_different_argument_is_refused_by_name_and_has_another_default_directory(tmp_path, override):
    opened(tmp_path)
    key = override.partition("=")[0]
    before = (tmp_path / IDENTITY).read_text()
    for check in (
        lambda: opened(tmp_path, override),
        lambda: check_output_dir(tmp_path, arguments_of(config_of(override))),
    ):
        with pytest.raises(EvaluationError) as refused:
            check()
        assert f" {key} is " in str(refused.value)
        assert " and was " in str(refused.value)
    assert (tmp_path / IDENTITY).read_text() == before
    assert default_output_dir(config_of(override), "m") != default_output_dir(config_of(), "m")


@pytest.mark.parametrize(
    "override",
    [
        *("evaluate.output_dir=x", "placement.call_timeout_s=5000", "reward.processes=1", "reward.max_failures=0.5"),
        *("placement.start_timeout_s=9", "job.driver_cpus=2.0", "data.fraction=0.5"),
        *("evaluate.threshold=0.5", "evaluate.pass_at=[1,2]", "evaluate.resamples=9"),
        *("rollout.request_timeout_s=9", "rollout.kv_cache_gb=2", "rollout.sleep_level=1"),
    ],
)
def test_what_changes_no_row_may_change(tmp_path, override):
    opened(tmp_path)
    opened(tmp_path, override)
    check_output_dir(tmp_path, arguments_of(config_of(override)))
    assert default_output_dir(config_of(override), "m") == default_output_dir(config_of(), "m")


JUDGE = ("roles.reward.target=rlpack.workers.judge:JudgeWorker", "judge.url=http://a/v1", "judge.model=m")


@pytest.mark.parametrize(
    "override",
    [
        *("judge.url=http://b/v1", "judge.model=n", "judge.prompt_template='{completion}'", "judge.max_score=5.0"),
        *("judge.weight=2.0", "judge.max_tokens=9"),
    ],
)
def test_another_judge_is_another_argument(tmp_path, override):
    opened(tmp_path, *JUDGE)
    with pytest.raises(EvaluationError, match=rf" {override.partition('=')[0]} is .* and was "):
        opened(tmp_path, *JUDGE, override)


def test_how_a_judge_is_called_may_change_and_no_judge_is_no_argument(tmp_path):
    opened(tmp_path, *JUDGE)
    limits = ("timeout_s=9.0", "retries=0", "backoff_s=0.5", "concurrency=1", "max_failures=0.5", "api_key_env=KEY")
    opened(tmp_path, *JUDGE, *(f"judge.{limit}" for limit in limits))
    assert not any(key.startswith("judge.") for key in arguments_of(config_of()))


def evaluation_next_to(folder, *overrides):
    """Open an evaluation in its default directory, below a folder, and return the directory."""
    directory = folder / default_output_dir(config_of(*overrides), "m").name
    directory.mkdir()
    opened(directory, *overrides)
    return directory


def test_a_new_evaluation_says_in_one_line_how_it_differs_from_the_nearest_of_the_same_model(tmp_path):
    config = config_of("seed=2")
    new = tmp_path / default_output_dir(config, "m").name
    assert other_evaluation(new, arguments_of(config)) is None
    evaluation_next_to(tmp_path, *("seed=3", "rollout.top_k=1", "rollout.top_p=0.5", "evaluate.samples=3"))
    line = f"a new evaluation; that in {tmp_path}/m-"
    told = other_evaluation(new, arguments_of(config))
    assert told.startswith(line)
    assert told.endswith("rollout.top_p is 1.0 and was 0.5; and 1 more")
    assert told.count(" was ") == 3
    nearest = evaluation_next_to(tmp_path)
    told = other_evaluation(new, arguments_of(config))
    assert told == f"a new evaluation; that in {nearest} has other arguments: seed is 2 and was 1"
    evaluation_next_to(tmp_path, "seed=2")
    assert other_evaluation(new, arguments_of(config)) is None  # it goes on


def test_evaluations_of_other_models_and_unreadable_ones_are_not_mentioned(tmp_path):
    config = config_of("seed=2")
    new = tmp_path / default_output_dir(config, "m").name
    evaluation_next_to(tmp_path, "model.path=other")
    damaged = evaluation_next_to(tmp_path)
    (damaged / IDENTITY).write_text("{")
    assert other_evaluation(new, arguments_of(config)) is None


def test_changed_files_of_prompts_or_model_are_refused(tmp_path):
    opened(tmp_path)
    with pytest.raises(EvaluationError, match="began with other files of the model and the prompts"):
        opened(tmp_path, hashes={"prompts": "3", "model": "4"})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.yaml", "", "which holds a run"),
        ("model", "", "unrelated files \\(model\\)"),
        ("thesis.tex", "", "unrelated files \\(thesis.tex\\)"),
        (IDENTITY, "{", "can't be read"),
        (IDENTITY, '{"format": 1, "arguments": {}, "hashes": {}}', "not in the format of this version"),
        (IDENTITY, "[]", "not in the format of this version"),
    ],
)
def test_a_directory_with_other_content_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(EvaluationError, match=words):
        check_output_dir(tmp_path, arguments_of(config_of()))


def test_a_file_and_a_name_that_is_too_long_are_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / ("x" * 300)):
        with pytest.raises(EvaluationError, match="can't be a directory"):
            check_output_dir(path, {})


def test_a_new_or_empty_directory_is_fine(tmp_path):
    check_output_dir(tmp_path, {})
    check_output_dir(tmp_path / "a" / "b", {})
    (tmp_path / "run.log").touch()
    (tmp_path / "run.lock").touch()
    check_output_dir(tmp_path, {})


def test_failures_of_engines_add_up_over_parts_and_commands(tmp_path: Path):
    EngineFailures().add_to(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert EngineFailures.read(tmp_path) == EngineFailures(0, 0)
    EngineFailures(repeated_rows=3).add_to(tmp_path)
    EngineFailures(repeated_rows=1, engines_replaced=2).add_to(tmp_path)
    assert EngineFailures.read(tmp_path) == EngineFailures(4, 2)
    (tmp_path / ENGINES).write_text("{")
    with pytest.raises(EvaluationError, match=r"engines\.json can't be read: .*; delete it to count from 0"):
        EngineFailures.read(tmp_path)
