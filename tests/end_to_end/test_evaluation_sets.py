"""Evaluation sets by name: own prompts, own limit and own reward; test sets once, at the end."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.commands import done, records, started

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REWARD = """
def length(completion, answer, bonus=0.0):
    return len(completion) + bonus


def always(completion):
    return 1.0
"""
OVERRIDES = (
    *("data=jsonl", "data.source=train.jsonl", "data.validation_source=held_out.jsonl", "model=small"),
    *("reward.function=own_rewards:always", "rollout.max_new_tokens=6", "trainer.prompts_per_step=4"),
    *("trainer.group_size=2", "trainer.steps=4", "evaluation.every=2", "evaluation.samples=2", "data.fraction=1.0"),
)


def write(path: Path, letters: str) -> None:
    rows = [{"prompt": letter * count, "answer": letter * (4 - count)} for letter in letters for count in (1, 2, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", "abcdef")
    write(tmp_path / "held_out.jsonl", "gh")
    write(tmp_path / "other.jsonl", "xyz")
    (tmp_path / "own_rewards.py").write_text(REWARD)
    return tmp_path


def test_sets_are_measured_with_their_own_prompts_and_rewards_and_test_sets_at_the_end_only(folder: Path):
    sets = (
        "evaluation.sets.same={}",
        "evaluation.sets.length.reward_function=own_rewards:length",
        "evaluation.sets.bonus.reward_function=own_rewards:length",
        "evaluation.sets.bonus.reward_arguments.bonus=100.0",
        "evaluation.sets.test.source=other.jsonl",
        "evaluation.sets.test.limit=5",
        "evaluation.sets.test.at_end=true",
        "evaluation.sets.test.reward_function=own_rewards:length",
    )
    run = done(folder, *OVERRIDES, *sets, path=[folder])
    evaluated = [record for record in records(run.run_dir) if record["phase"] == "evaluation"]
    assert [record["step"] for record in evaluated] == [0, 2, 4]
    for record in evaluated:
        # The same prompts, seeds and reward give the same figures.
        for name in ("reward_sampled", "reward_best_of_n", "reward_greedy", "quarantined", "graded_rewards"):
            assert record[f"evaluation/same/{name}"] == record[f"evaluation/{name}"]
        assert record["evaluation/reward_sampled"] == 1.0
        # The same responses with another reward.
        length = record["evaluation/length/reward_sampled"]
        assert 0 < length <= 6
        assert record["evaluation/bonus/reward_sampled"] == pytest.approx(length + 100, rel=1e-6)
    at_end = ["evaluation/test/reward_sampled" in record for record in evaluated]
    assert at_end == [False, False, True]
    # 5 prompts with 2 sampled responses and a greedy one; all rewards are lengths of 2 or more characters, or 1 or 0.
    assert evaluated[-1]["evaluation/test/graded_rewards"] <= 5 * 3
    assert 0 < evaluated[-1]["evaluation/test/reward_best_of_n"] <= 6


def loss_of_transformers(model_dir: Path, rows: Path) -> float:
    """Return the loss that transformers computes from labels, over the tokens of all rows."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    total, count = 0.0, 0
    for row in map(json.loads, rows.read_text().splitlines()):
        prompt, target = (tokenizer(row[name], add_special_tokens=False).input_ids for name in ("prompt", "answer"))
        target.append(tokenizer.eos_token_id)
        labels = torch.tensor([[-100] * len(prompt) + target])
        with torch.no_grad():
            total += model(input_ids=torch.tensor([prompt + target]), labels=labels).loss.item() * len(target)
        count += len(target)
    return total / count


def test_supervised_recipes_measure_the_loss_of_each_set(folder: Path):
    overrides = ("recipe=sft", "data.completion_column=answer", "evaluation.sets.same.split=validation")
    test = ("evaluation.sets.test.source=other.jsonl", "evaluation.sets.test.at_end=true")
    run = done(folder, *OVERRIDES[:4], *overrides, *test, "trainer.steps=4", "evaluation.every=2", path=[folder])
    evaluated = [record for record in records(run.run_dir) if record["phase"] == "evaluation"]
    for record in evaluated:
        for name in ("loss", "perplexity"):
            assert record[f"evaluation/same/{name}"] == record[f"evaluation/{name}"]
    assert ["evaluation/test/loss" in record for record in evaluated] == [False, False, True]
    # Two ranks evaluated the model that they exported.
    for name, rows in (("", "held_out.jsonl"), ("test/", "other.jsonl")):
        truth = loss_of_transformers(run.run_dir / "model", folder / rows)
        assert evaluated[-1][f"evaluation/{name}loss"] == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("evaluation.sets.a.source=none.jsonl", "evaluation.sets.a.source is 'none.jsonl', but there is no such file"),
        ("evaluation.sets.a.reward_function=own_rewards:missing", "evaluation.sets.a.reward_function is 'own_"),
        ("evaluation.sets.a.reward_arguments.x=1", "evaluation.sets.a.reward_function is null; set both or neither"),
        ("evaluation.sets.a.limit=0", "evaluation.sets.a.limit"),
        ("evaluation.sets.a.limits=3", "evaluation.sets.a.limits"),
        ("evaluation.sets.a.reward_function=own_rewards:length", "evaluation.sets.a: "),
    ],
)
def test_a_wrong_set_is_refused_before_anything_starts(folder: Path, override: str, said: str):
    if override.endswith(":length"):  # a column that the set lacks, and the reward needs
        (folder / "plain.jsonl").write_text('{"prompt": "g"}\n')
        added = ("evaluation.sets.a.source=plain.jsonl", "data.answer_column=answer")
        (folder / "own_rewards.py").write_text(REWARD.replace("answer, bonus", "solution, bonus"))
    else:
        added = ()
    with started(folder, *OVERRIDES, override, *added, path=[folder]) as run:
        assert run.wait() in (2, 3), run.err
    assert said in run.err
    assert "Traceback" not in run.err
    assert not (folder / "run" / "metrics.jsonl").exists()
