"""`rlpack evaluate` on a run and on a model folder; stopped and continued, it writes the same files."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlpack.recipes.evaluate.checkpoint_export import export_checkpoint
from tests.end_to_end.commands import Command, records, started_words, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
FILES = ("samples.jsonl", "samples.html", "results.json", "evaluation.json")
# Slow enough that a signal comes between two parts.
SLOW = """
import time

def score(completion, answer):
    time.sleep(0.3)
    return len(completion) / 20
"""
ROWS = [("a1b2=", "3"), ("a2=", "2"), ("a2b2c1=", "5"), ("a0b1=", "1"), ("a1=", "1"), ("a1b1=", "2")]
FOLDER = ("placement.pools.main.ranks=1", "data=jsonl", "data.source=rows.jsonl", "reward.function=slow:score")
SMALL = ("evaluate.samples=2", "evaluate.prompts_per_part=1", "rollout.max_new_tokens=20", "reward.rows_per_call=1")


def evaluated(folder: Path, model: str, *overrides: str, output: str = "out") -> Command:
    """Run `rlpack evaluate` to its end, which has to be a good one and to leave no process."""
    words = ["evaluate", model, f"evaluate.output_dir={output}", *overrides]
    with started_words(folder, words, folder / output) as command:
        assert command.wait() == 0, command.err
        assert "Traceback" not in command.err
        assert command.left_behind() == []
    return command


def rows_of(output: Path) -> list[dict]:
    path = output / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def of_run(uninterrupted, tmp_path_factory):
    """Return the command that evaluated the run's newest checkpoint as the run itself did."""
    return evaluated(tmp_path_factory.mktemp("of_run"), str(uninterrupted.run_dir), "evaluate.samples=4")


def test_a_runs_newest_checkpoint_has_the_results_of_the_runs_own_evaluation(of_run, uninterrupted):
    own = [record for record in records(uninterrupted.run_dir) if record["phase"] == "evaluation"][-1]
    document = json.loads((of_run.run_dir / "results.json").read_text())
    statistics = {name: one["value"] for name, one in document["statistics"].items()}
    assert own["step"] == 9
    assert document["checkpoint"] == str(uninterrupted.run_dir / "checkpoints/train/step-9")
    assert statistics["mean_reward"] == pytest.approx(own["evaluation/reward_sampled"], abs=1e-6)
    assert statistics["best_of_n"] == pytest.approx(own["evaluation/reward_best_of_n"], abs=1e-6)
    assert statistics["greedy_mean"] == pytest.approx(own["evaluation/reward_greedy"], abs=1e-6)
    assert [name for name in statistics if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4"]


def test_the_files_are_complete_and_the_export_is_deleted(of_run):
    rows = rows_of(of_run.run_dir)
    assert [(row["prompt_index"], row["sample"]) for row in rows] == [
        (p, s) for p in range(8) for s in (0, 1, 2, 3, None)
    ]
    assert len({row["seed"] for row in rows if row["sample"] is not None}) == 32
    for row in rows:
        correct = "#" in row["response"] and row["response"].rpartition("#")[2] == row["answer"]
        assert row["reward"] == float(correct)
        assert row["extracted_answer"] == (row["response"].rpartition("#")[2] if "#" in row["response"] else None)
        assert row["prompt_tokens"] == len(row["prompt"])  # one token per character
        # Special tokens other than the last leave no text.
        assert row["response_tokens"] >= len(row["response"]) + (row["finish_reason"] == "stop")
    assert sorted(path.name for path in of_run.run_dir.iterdir()) == sorted([*FILES, "run.log", "spans"])


def test_the_table_is_printed_with_intervals_and_says_how_votes_are_counted(of_run):
    lines = [line.split() for line in of_run.out.splitlines()]
    document = json.loads((of_run.run_dir / "results.json").read_text())
    mean = document["statistics"]["mean_reward"]
    shown = [f"{mean['value']:.4f}", f"[{mean['low']:.4f},", f"{mean['high']:.4f}]"]
    assert ["mean", "reward", *shown] in lines
    assert "40 responses: 8 prompts × 4 samples and 8 greedy ones" in of_run.out
    assert f"evaluating the checkpoint in {document['checkpoint']}\n" in of_run.out
    assert re.search(r"starting the roles .*\nthe roles are ready after \d+\.\d s\n", of_run.out)
    page = (of_run.run_dir / "samples.html").read_text()
    assert re.search(r"<h1>[^/<]*, step 9, on arithmetic</h1>", page)
    assert "checkpoints/train/step-9; split validation of arithmetic</p>" in page
    assert "> all (40)</label>" in page
    assert re.search(r"majority vote by the text after the last '#'", of_run.out)


def test_a_checkpoints_export_is_the_model_that_the_run_exported(uninterrupted, tmp_path):
    export_checkpoint(uninterrupted.run_dir / "checkpoints/train/step-9", tmp_path / "model")
    exported, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", uninterrupted.run_dir / "model")
    )
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "model" / name).read_text() == (uninterrupted.run_dir / "model" / name).read_text()


def test_stopped_twice_and_continued_an_evaluation_writes_the_files_of_an_uninterrupted_one(uninterrupted, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    model = str(shutil.copytree(uninterrupted.run_dir / "model", tmp_path / "model"))
    whole = evaluated(tmp_path, model, *FOLDER, *SMALL, output="whole")
    for how, parts in (("kill", 1), ("ctrl-c", 3)):
        words = ["evaluate", model, "evaluate.output_dir=stopped", *FOLDER, *SMALL]
        with started_words(tmp_path, words, tmp_path / "stopped", forks_workers=how != "kill") as command:
            until(lambda parts=parts: len(rows_of(tmp_path / "stopped")) >= 3 * parts, 120)
            command.process.kill() if how == "kill" else command.interrupt()
            assert command.wait() == (-9 if how == "kill" else 130)
            assert command.left_behind() == []
        assert 3 * parts <= len(rows_of(tmp_path / "stopped")) < 18
        assert not (tmp_path / "stopped" / "results.json").exists()
    assert "run the same command again to continue" in command.err
    assert "Traceback" not in command.err
    with (tmp_path / "stopped" / "samples.jsonl").open("a") as file:
        file.write('{"prompt_index": 4, "uid"')  # as a kill in the middle of a write leaves it
    last = evaluated(tmp_path, model, *FOLDER, *SMALL, output="stopped")
    assert re.search(r"continuing after [345] of 6 prompts", last.out)
    for name in FILES:
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert "majority vote by exact text" in whole.out
    again = evaluated(tmp_path, model, *FOLDER, *SMALL, output="stopped")
    assert "starting the roles" not in again.out
    assert again.out.count("mean reward") == last.out.count("mean reward") == 1
    rows = (tmp_path / "stopped" / "samples.jsonl").read_bytes()
    other = evaluated(
        tmp_path, model, *FOLDER, *SMALL, "evaluate.threshold=0.5", "evaluate.pass_at=[1]", output="stopped"
    )
    assert "all 6 prompts were answered before" in other.out
    assert "starting the roles" not in other.out
    assert (tmp_path / "stopped" / "samples.jsonl").read_bytes() == rows
    sampled = [row["reward"] >= 0.5 for row in rows_of(tmp_path / "stopped") if row["sample"] is not None]
    statistics = json.loads((tmp_path / "stopped" / "results.json").read_text())["statistics"]
    assert statistics["pass@1"]["value"] == pytest.approx(sum(sampled) / len(sampled))
    assert "pass@1" not in json.loads((tmp_path / "whole" / "results.json").read_text())["statistics"]
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"eos_token": "<eos>"', '"eos_token": "a"'))
    words = ["evaluate", model, "evaluate.output_dir=stopped", *FOLDER, *SMALL]
    with started_words(tmp_path, words, tmp_path / "stopped") as command:
        assert command.wait() == 2
        assert "which holds an evaluation that began with other files of the tokenizer; restore them" in command.err
