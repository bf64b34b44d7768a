"""The warning of an evaluation whose held-out prompts are not those of its run."""

import json
from pathlib import Path

import pytest

from rlpack.batch.errors import DataError
from rlpack.checkpoint.commit import new_checkpoint
from rlpack.cli.evaluate import _base_values, evaluation_config
from rlpack.config.compose import compose, compose_evaluation
from rlpack.config.schema import Config
from rlpack.recipes.driver.splits import load_held_out, load_splits
from rlpack.recipes.evaluate.run_prompts import warn_of_other_prompts
from rlpack.startup.evaluated_model import find_model
from tests.builders import tiny_tokenizer

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1), "worked": f"{number + 1}"} for number in range(4)]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a checkpoint of a run whose tokenizer is loaded and whose held-out file has a relative path."""
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "held.jsonl", ROWS[:3])
    data = ("data=jsonl", "data.source=train.jsonl", "data.validation_source=held.jsonl", "data.fraction=0.5")
    config = compose([*data, "data.completion_column=worked", f"model.tokenizer={tmp_path / 'tokenizer'}"])
    _, prompts, held_out = load_splits(config)
    state = dict.fromkeys(("reference", "records")) | {
        "progress": {"phase": "train", "step": 1},
        "config": config.model_dump(mode="json"),
        "prompts": prompts.fingerprint,
        "held_out": held_out.fingerprint,
    }
    with new_checkpoint(tmp_path / "run" / "checkpoints" / "train", 1) as staging:
        (staging.path / "actor").mkdir()
        staging.commit(state)
    return tmp_path / "run"


def evaluated(run: Path, *overrides: str) -> Config:
    """Compare the prompts of `rlpack evaluate <run> <overrides>`, whose export has the run's tokenizer."""
    config = compose_evaluation(overrides, _base_values(find_model(str(run), None), overrides))
    model = config.model.model_copy(update={"tokenizer": str(run.parent / "tokenizer")})
    warn_of_other_prompts(config, load_held_out(config.model_copy(update={"model": model}))[1])
    return config


@pytest.mark.parametrize("override", ["data.max_prompt_tokens=99", "data.answer_column=worked", "seed=5"])
def test_the_runs_prompts_are_no_warning_whatever_else_is_set(
    run: Path, caplog: pytest.LogCaptureFixture, override: str
) -> None:
    assert evaluated(run).data.source == "held.jsonl"
    evaluated(run, override)
    assert "other prompts" not in caplog.text


def test_a_changed_file_of_the_same_path_is_a_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(Path("held.jsonl"), ROWS[1:])
    evaluated(run)
    expected = "held.jsonl has other prompts than when the run wrote the checkpoint (relative paths start at "
    assert expected + str(Path.cwd()) in caplog.text


def test_a_file_of_the_same_name_in_another_directory_is_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run.parent / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    write(other / "held.jsonl", [{"prompt": "1+1=", "answer": "2"}])  # without a column that the run reads
    evaluated(run)
    assert f"start at {other}: run the command in the directory where the run was started" in caplog.text


def test_prompts_that_the_command_names_are_no_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(Path("held.jsonl"), ROWS[1:])
    evaluated(run, "data.validation_source=train.jsonl")
    evaluated(run, "data=jsonl", "data.source=train.jsonl")
    assert "other prompts" not in caplog.text


def test_a_path_that_leads_nowhere_is_an_error_that_says_where_it_starts(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run.parent / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    with pytest.raises(
        DataError,
        match=rf"no file held\.jsonl; .*{other}.*held.jsonl comes from the run's config",
    ):
        evaluation_config(str(run), None, [])
    with pytest.raises(DataError, match=rf"data\.source is 'mine\.jsonl', but there is no such file in {other}$"):
        evaluation_config(str(run), None, ["data.source=mine.jsonl", "data.validation_source=null"])
