"""Data, rewards and groups that are unlike the built-in task's."""

import json
import math
import re

import pytest
from transformers import AutoModelForCausalLM

from tests.end_to_end.commands import curve, done, records, started, steps
from tests.end_to_end.settings import EASY, UNEVEN

pytestmark = [pytest.mark.ray, pytest.mark.slow]
# NaN or nothing for every completion of some prompts, and for one completion in two of another one.
REWARD = """
import os

def score(prompts, completions, kind, *, scale):
    rewards = []
    for completion, what in zip(completions, kind, strict=True):
        value = scale * sum(character.isdigit() for character in completion) / 8
        rewards.append({"nan": float("nan"), "none": None, "infinite": float("inf")}.get(what, value))
    return rewards
"""
# A custom role that scores one batch, and returns an invalid reward for the next.
JUDGE = """
import torch

from rlpack.worker import Worker, sharded

class Judge(Worker):
    calls = 0

    @sharded()
    def score(self, shard):
        self.calls += 1
        rows = shard.num_rows
        reward = 5.0 if self.calls <= 2 else float("nan")  # a trial on demonstrations, and the first step
        verdict = {"rewards": torch.full((rows,), reward), "quarantined": torch.zeros(rows, dtype=torch.bool)}
        return shard.keep([]).union(verdict)
"""
KINDS = ("good", "nan", "good", "none", "good", "infinite", "good", "good")
HOSTILE = "\x1b[31m[red]</pre><script>alert(1)</script> é 🙂 http://example.org"


def assert_finite(run_dir):
    for record in records(run_dir):
        assert all(math.isfinite(value) for name, value in record.items() if name != "phase"), record


@pytest.fixture(scope="module")
def quarantined(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jsonl")
    (folder / "my_reward.py").write_text(REWARD)
    rows = [
        {"question": f"{'0123456789'[:number]}=", "kind": kind, "input_ids": [1], "completion": "taken"}
        for number, kind in enumerate(KINDS, start=1)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text(json.dumps({"question": HOSTILE, "kind": "good"}) + "\n")
    return done(
        folder,
        "data=jsonl",
        "data.source=train.jsonl",
        "data.validation_source=held_out.jsonl",
        "data.prompt_column=question",
        "data.answer_column=null",
        "data.max_prompt_tokens=80",
        "reward.function=my_reward:score",
        "reward.arguments.scale=2.0",
        "sft_warmup.steps=0",
        "trainer.steps=3",
        f"trainer.prompts_per_step={len(KINDS)}",
        "trainer.group_size=4",
        "trainer.mini_batch_size=8",
        "algorithm.baseline=leave_one_out",
        "algorithm.aggregation=seq_mean_token_mean",
        "rollout.max_new_tokens=16",
        "rollout.top_k=20",
        "rollout.top_p=0.95",
        "batching.max_tokens=24",
        "batching.overlong=drop",
        "evaluation.every=2",
        "logger.samples=1",
    )


def test_rows_without_a_finite_reward_are_counted_and_the_run_goes_on(quarantined):
    bad = sum(kind != "good" for kind in KINDS)
    assert curve(quarantined.run_dir, "reward/quarantined") == [4 * bad] * 3
    assert steps(quarantined.run_dir, "train") == [1, 2, 3]
    assert_finite(quarantined.run_dir)
    assert "quarantined 12" in quarantined.out


def test_columns_that_rollouts_have_themselves_are_left_out_with_a_warning(quarantined):
    assert "train.jsonl: the columns completion, input_ids are left out" in quarantined.err


def test_the_other_rows_train(quarantined):
    assert min(curve(quarantined.run_dir, "actor/grad_norm")) > 0
    assert min(curve(quarantined.run_dir, "reward/mean")) > 0
    assert max(curve(quarantined.run_dir, "actor/skipped_steps")) < 4  # of the four mini-batches


def test_sequences_over_the_budget_are_dropped_and_counted(quarantined):
    dropped = curve(quarantined.run_dir, "packing/dropped")
    assert max(dropped) > 0
    assert dropped == curve(quarantined.run_dir, "packing/overlong")


def test_a_hostile_text_steers_neither_terminal_nor_report(quarantined):
    assert "\x1b" not in quarantined.out
    assert "[red]" in quarantined.out
    page = (quarantined.run_dir / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_graded_rewards_are_not_called_accuracy_and_the_console_is_rlpacks_own(quarantined):
    assert min(curve(quarantined.run_dir, "evaluation/graded_rewards", "evaluation")) > 0
    page = (quarantined.run_dir / "report.html").read_text().partition("All metrics")[0]
    assert "accuracy" not in quarantined.out + page
    assert "held-out mean reward, sampled" in page
    assert not [line for line in quarantined.err.splitlines() if " INFO " in line or "it/s" in line]


def test_a_group_of_one_has_no_advantage_and_changes_nothing(tmp_path):
    sizes = ("trainer.steps=2", "trainer.group_size=1", "trainer.prompts_per_step=4", "trainer.mini_batch_size=2")
    warmup = ("sft_warmup.steps=2", "sft_warmup.batch_size=4")
    run = done(tmp_path, *EASY, *warmup, *sizes, "trainer.updates_per_batch=2", "algorithm.kl_coef=0", ranks=1)
    assert_finite(run.run_dir)
    for name in ("advantage/mean", "advantage/std", "actor/loss", "actor/grad_norm"):
        assert curve(run.run_dir, name) == [0, 0]
    assert curve(run.run_dir, "actor/skipped_steps") == [4, 4]
    assert "a group of one" in run.err


def test_supervised_fine_tuning_lowers_its_loss_and_needs_no_rollout(tmp_path):
    overrides = [word for word in UNEVEN if word.startswith(("data.", "batching."))]
    run = done(tmp_path, "recipe=sft", *overrides, "trainer.steps=40", "trainer.prompts_per_step=32",
               "actor.optimizer.learning_rate=2e-3", "batching=dynamic", ranks=1)  # fmt: skip
    losses = curve(run.run_dir, "actor/loss")
    assert steps(run.run_dir, "train") == list(range(1, 41))
    assert losses[-1] < losses[0] / 3
    assert (steps(run.run_dir, "sft_warmup"), steps(run.run_dir, "evaluation")) == ([], [0, 10, 20, 30, 40])
    held_out = curve(run.run_dir, "evaluation/loss", "evaluation")
    assert held_out[-1] < held_out[0] / 2
    assert_finite(run.run_dir)
    assert AutoModelForCausalLM.from_pretrained(run.run_dir / "model").config.model_type == "qwen2"


def test_a_role_of_ones_own_is_one_line_of_configuration_and_its_failure_names_role_and_step(tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    with started(tmp_path, *EASY, "sft_warmup.steps=1", "trainer.steps=3", "trainer.prompts_per_step=4",
                 "roles.judge.target=judge:Judge", ranks=1) as run:  # fmt: skip
        assert run.wait() == 1
    assert re.search(r"role judge, rank \d, in score, step 2 of train: row 0 has the reward nan and is not q", run.err)
    assert run.left_behind() == []
    assert steps(run.run_dir, "train") == [1]
    (reward,) = curve(run.run_dir, "reward/mean")
    assert 5 <= reward <= 6
