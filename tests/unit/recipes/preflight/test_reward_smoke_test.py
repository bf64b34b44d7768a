"""Scoring roles are tested on demonstrations; through the command: tests/end_to_end/test_rewards.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.reward_rules import JUDGE
from rlpack.config.schema import Judge, Reward, Role, Rollout, SFTWarmup
from rlpack.distributed.errors import RoleError
from rlpack.recipes import sft
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.splits import load_splits
from rlpack.rewards.functions import final_answer
from tests.unit.recipes.driver.sessions import SavingSession, run_of, session_of, set_group


def session_with(folder: Path, score) -> SavingSession:
    session = session_of(folder, sft_warmup=SFTWarmup(steps=1, batch_size=4))
    set_group(session, "actor", train_step=[{}], reset_optimizer=None)
    set_group(session, "reward", score=score)
    return session


def by_answer(batch: BatchedDataDict) -> BatchedDataDict:
    texts = [list(batch[name]) for name in ("prompt", "completion", "answer")]
    rewards = torch.tensor(final_answer(*texts))
    return batch.keep([]).union({"rewards": rewards, "quarantined": torch.zeros(batch.num_rows, dtype=torch.bool)})


def test_demonstrations_are_scored_like_responses_and_record_no_metrics(tmp_path: Path):
    batches: list[BatchedDataDict] = []

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        batches.append(batch)
        return by_answer(batch)

    session = session_with(tmp_path, score)
    sft.sft_warmup(session)
    (batch,) = batches  # once
    _, prompts, _ = load_splits(session.config)
    assert list(batch["completion"]) == [example.demonstration for example in prompts.examples[:16]]
    assert set(batch["finish_reason"]) == {"stop"}
    mean = by_answer(batch)["rewards"].mean().item()
    assert run_of(session).notes == [f"role reward scored 16 demonstrations: mean reward {mean:.3g}"]
    assert not any(name.startswith("reward/") for record in run_of(session).records for name in record)


def test_demonstrations_without_a_reward_are_counted_and_left_out_of_the_mean(tmp_path: Path):
    def score(batch: BatchedDataDict) -> BatchedDataDict:
        rewards, quarantined = torch.full((batch.num_rows,), 0.25), torch.zeros(batch.num_rows, dtype=torch.bool)
        rewards[:2], quarantined[:2] = 9.0, True
        return batch.keep([]).union({"rewards": rewards, "quarantined": quarantined})

    session = session_with(tmp_path, score)
    sft.sft_warmup(session)
    expected = "role reward scored 16 demonstrations: mean reward 0.25, 2 without a reward"
    assert run_of(session).notes == [expected]


def test_a_role_that_returns_no_rewards_is_reported_before_the_first_supervised_step(tmp_path: Path):
    session = session_with(tmp_path, lambda batch: batch.keep([]).union({"scores": torch.zeros(batch.num_rows)}))
    with pytest.raises(RoleError, match=r"role reward, .*: on 16 demonstrations, .* without 'rewards'"):
        sft.sft_warmup(session)
    assert session.progress == Progress()
    assert run_of(session).logged == []


def test_a_resumed_run_tests_nothing(tmp_path: Path):
    session = session_with(tmp_path, lambda batch: pytest.fail("called"))
    session.progress = Progress(demonstrations_trained=4)
    sft.sft_warmup(session)


def failing(batch: BatchedDataDict) -> BatchedDataDict:
    nowhere = torch.ones(batch.num_rows, dtype=torch.bool)
    rewards = {"rewards": torch.zeros(batch.num_rows), "quarantined": nowhere}
    return batch.keep([]).union(rewards | {"reward_failure": nowhere.long() * 2})


def with_section(session: SavingSession, **sections: Any) -> SavingSession:
    session.config = session.config.model_copy(update=sections)
    return session


def test_functions_that_fail_on_every_demonstration_end_the_run_unless_allowed(tmp_path: Path):
    message = r"role reward, .* it failed on all of them \(reward/errors: 16\); .*reward\.max_failures=1"
    with pytest.raises(RoleError, match=message):
        sft.sft_warmup(session_with(tmp_path, failing))
    session = with_section(session_with(tmp_path, failing), reward=Reward(max_failures=1.0))
    sft.sft_warmup(session)
    assert run_of(session).notes == ["role reward scored 16 demonstrations: no rewards"]


def test_a_judge_that_fails_on_every_demonstration_is_named_with_its_own_key(tmp_path: Path):
    session = session_with(tmp_path, by_answer)
    with_section(session, roles=session.config.roles | {"critic_llm": Role(target=JUDGE)})
    set_group(session, "critic_llm", score=failing)
    with pytest.raises(RoleError, match=r"role critic_llm, .* set judge\.max_failures=1"):
        sft.sft_warmup(session)
    sft.sft_warmup(with_section(session, judge=Judge(max_failures=1.0)))
    assert len(run_of(session).notes) == 2


def test_a_function_may_fail_on_some_demonstrations(tmp_path: Path):
    def score(batch: BatchedDataDict) -> BatchedDataDict:
        failures = torch.arange(batch.num_rows) % 4  # every way there is, and none
        rewards = {"rewards": torch.ones(batch.num_rows), "quarantined": torch.ones(batch.num_rows, dtype=torch.bool)}
        return batch.keep([]).union(rewards | {"reward_failure": failures})

    session = session_with(tmp_path, score)
    sft.sft_warmup(session)
    assert session.progress.demonstrations_trained == 4


def test_a_function_may_give_no_reward_for_demonstrations_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    session = session_with(tmp_path, lambda batch: failing(batch).drop(["reward_failure"]))
    sft.sft_warmup(session)
    assert session.progress.demonstrations_trained == 4
    assert "role reward gave none of 16 demonstrations a reward; does the function return a number?" in caplog.text


def test_demonstrations_longer_than_a_response_may_be_are_left_out(tmp_path: Path):
    session = session_with(tmp_path, by_answer)
    _, prompts, _ = load_splits(session.config)
    lengths = [len(example.demonstration or "") + 1 for example in prompts.examples[:16]]  # and the end of sequence
    longest = sorted(lengths)[7]
    sft.sft_warmup(with_section(session, rollout=Rollout(max_new_tokens=longest)))
    left_out, note = run_of(session).notes
    assert left_out.startswith(f"{sum(length > longest for length in lengths)} of the first 16 demonstrations exceed")
    assert f" scored {sum(length <= longest for length in lengths)} demonstrations: " in note
    shortest = with_section(session_with(tmp_path, by_answer), rollout=Rollout(max_new_tokens=1))
    sft.sft_warmup(shortest)
    (note,) = run_of(shortest).notes
    assert note.startswith("16 of the first 16 demonstrations exceed rollout.max_new_tokens=1")
