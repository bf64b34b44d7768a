import json
from itertools import pairwise

import pytest

from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.observe.evaluation.evaluation_results import (
    PromptRewards,
    by_prompt,
    page_sources,
    page_title,
    result_lines,
    result_notes,
    results_document,
)
from tests.unit.observe.evaluation.evaluation_rows import sample_row


def collected(*prompts, greedy=(), winners=None):
    rewards = PromptRewards()
    for number, samples in enumerate(prompts):
        rows = [sample_row(number, sample, reward=reward) for sample, reward in enumerate(samples)]
        rows += [sample_row(number, None, reward=greedy[number], finish_reason="length")] if greedy else []
        rewards.add(rows, winners[number] if winners else range(len(samples)))
    return rewards


def document_of(rewards, settings, **changes):
    failures = {"repeated_rows": 0, "engines_replaced": 0} | changes
    return results_document({"model": "m"}, rewards, settings, seed=1, majority_by="exact text", failures=failures)


def test_every_statistic_is_the_mean_over_prompts_computed_by_hand():
    rewards = collected([1.0, 0.0], [0.0, 0.0], [1.0, 1.0], greedy=[0.0, 1.0, 1.0], winners=[[1], [0, 1], [0]])
    document = document_of(rewards, Evaluate(samples=2))
    values = {name: one["value"] for name, one in document["statistics"].items()}
    assert values == pytest.approx(
        {
            "mean_reward": 0.5,
            "best_of_n": 2 / 3,
            "pass@1": 0.5,
            "pass@2": 2 / 3,
            "majority_vote": 1 / 3,
            "greedy_mean": 2 / 3,
        }
    )
    assert all(one["low"] <= one["value"] <= one["high"] for one in document["statistics"].values())
    assert (document["prompts"], document["responses"], document["passes_from_reward"]) == (3, 9, 1.0)
    assert document["truncated_fraction"] == pytest.approx(1 / 3)
    json.dumps(document, allow_nan=False)


def test_graded_rewards_have_pass_at_k_from_the_threshold_on_and_none_without():
    rewards = collected([0.2, 0.6], [0.4, 0.5])
    assert not [name for name in document_of(rewards, Evaluate(samples=2))["statistics"] if name.startswith("pass")]
    document = document_of(rewards, Evaluate(samples=2, threshold=0.5, pass_at=(2,)))
    assert document["statistics"]["pass@2"]["value"] == 1.0
    assert "pass@1" not in document["statistics"]
    assert document["passes_from_reward"] == 0.5
    assert "greedy_mean" not in document["statistics"]


def test_failures_of_engines_are_in_the_results_and_mentioned():
    document = document_of(collected([1.0]), Evaluate(samples=1), repeated_rows=3, engines_replaced=1)
    assert (document["repeated_rows"], document["engines_replaced"]) == (3, 1)
    expected = (
        "3 responses were generated again from their seeds, and 1 engines replaced, because engines failed (run.log)"
    )
    assert expected in result_notes(document)
    assert not any("engines" in note for note in result_notes(document_of(collected([1.0]), Evaluate(samples=1))))


def test_a_response_without_a_reward_counts_as_0_and_is_mentioned():
    document = document_of(collected([None, 1.0]), Evaluate(samples=2))
    assert document["statistics"]["mean_reward"]["value"] == 0.5
    assert document["responses_without_reward"] == 1
    note = "1 of 2 responses have no reward: they count as 0 in means, and never pass, vote, or are the best"
    assert note in result_notes(document)


def test_a_response_without_a_reward_is_never_the_best_and_never_passes():
    rewards = collected([None, -1.0, -2.0], [None, None, None], greedy=[-1.0, None], winners=[[0, 2], [0, 1, 2]])
    document = document_of(rewards, Evaluate(samples=3, threshold=-1.5, pass_at=(3,)))
    values = {name: one["value"] for name, one in document["statistics"].items()}
    # By prompt: -3 / 3 and 0; -1 and 0, as nothing has a reward; 1 and 0; -2, of the winner with a reward, and 0.
    expected = {"mean_reward": -0.5, "best_of_n": -0.5, "pass@3": 0.5, "majority_vote": -1.0, "greedy_mean": -0.5}
    assert values == pytest.approx(expected)
    json.dumps(document, allow_nan=False)


def test_missing_rewards_leave_rewards_of_0_and_1_with_a_pass_at_k():
    binary = collected([None, 1.0], [0.0, 0.0], greedy=[None, 1.0])
    assert document_of(binary, Evaluate(samples=2))["statistics"]["pass@1"]["value"] == 0.25
    graded = collected([None, 1.0], [0.0, 0.0], greedy=[None, 0.5])
    assert "pass@1" not in document_of(graded, Evaluate(samples=2))["statistics"]


def test_the_table_names_the_number_of_samples_and_how_votes_are_counted():
    document = document_of(collected([0.5, 0.5]), Evaluate(samples=2))
    assert [name for name, _, _ in result_lines(document)] == ["mean reward", "best of 2", "majority vote"]
    assert result_notes(document)[:3] == [
        "2 responses: 1 prompts × 2 samples",
        "majority vote by exact text",
        "pass@k: undefined: rewards are not all 0 or 1; set evaluate.threshold",
    ]


def test_the_number_of_responses_is_explained():
    rewards = collected([1.0, 0.0], [0.0, 0.0], [1.0, 1.0], greedy=[0.0, 1.0, 1.0])
    document = document_of(rewards, Evaluate(samples=2))
    assert document["responses"] == 9
    assert result_notes(document)[0] == "9 responses: 3 prompts × 2 samples and 3 greedy ones"


@pytest.mark.parametrize(
    ("evaluated", "title", "sources"),
    [
        (
            {"checkpoint": "/a/runs/mine/checkpoints/sft_warmup/step-7", "model": None, "data": "/a/p.jsonl"},
            "mine, warm-up step 7, on p.jsonl",
            "checkpoint /a/runs/mine/checkpoints/sft_warmup/step-7; split test of /a/p.jsonl",
        ),
        (
            {"checkpoint": None, "model": "/a/runs/mine/model", "data": "org/name"},
            "mine/model on name",
            "model /a/runs/mine/model; split test of org/name",
        ),
    ],
)
def test_the_page_is_titled_by_run_and_step_and_names_the_full_paths_below(evaluated, title, sources):
    document = evaluated | {"split": "test"}
    assert page_title(document) == title
    assert page_sources(document) == sources


def test_more_prompts_make_narrower_intervals():
    widths = []
    for count in (4, 16, 64):
        one = document_of(collected(*[[1.0], [0.0]] * count), Evaluate(samples=1))["statistics"]["mean_reward"]
        widths.append(one["high"] - one["low"])
    assert all(1.5 < wide / narrow < 2.7 for wide, narrow in pairwise(widths))


def test_rows_are_grouped_by_prompt():
    rows = [sample_row(prompt, sample) for prompt in range(3) for sample in range(2)]
    assert [[row.prompt_index for row in group] for group in by_prompt(rows, 2)] == [[0, 0], [1, 1], [2, 2]]
