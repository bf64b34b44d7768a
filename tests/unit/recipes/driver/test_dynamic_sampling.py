"""Which groups a step trains on, and what responses are compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Rollout, Trainer
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.recipes.driver.dynamic_sampling import filter_overlong, sample_informative_groups
from rlpack.recipes.driver.policy_stages import add_loss_weights
from rlpack.recipes.driver.reward_stages import PendingRewards, collect_greedy_rewards
from rlpack.recipes.driver.rollout_stages import draw_prompts, generate_greedily
from rlpack.testing.local_ranks import LocalRanks
from rlpack.worker import Worker, sharded
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import SavingSession, session_of, set_group

TRAINER = Trainer(prompts_per_step=3, group_size=2)


def answering(folder: Path, rounds: Sequence[Sequence[float]]) -> tuple[SavingSession, list[int]]:
    """Return a session whose roles make two responses per prompt, with set rewards per round, and the batch sizes."""
    session = session_of(folder, recipe="dapo", trainer=TRAINER, rollout=Rollout(max_new_tokens=10))
    sizes: list[int] = []

    def generate(prompts: BatchedDataDict, params: object) -> BatchedDataDict:
        sizes.append(prompts.num_rows)
        responses = tiny_rollouts([(3, 10 if row % 2 else 4) for row in range(prompts.num_rows)])
        reasons = ["length" if row % 2 else "stop" for row in range(prompts.num_rows)]
        texts = [str(row) for row in range(prompts.num_rows)]
        columns = {
            name: column for name, column in responses.items() if name not in {"finish_reason", "group_ids", "uid"}
        }
        back = prompts.keep(["group_ids", "uid"]).union(columns)
        return back.union({"finish_reason": reasons, "completion": texts})

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        rewards = torch.tensor(rounds[len(sizes) - 1])
        return batch.keep([]).union({"rewards": rewards, "quarantined": torch.zeros(len(rewards), dtype=torch.bool)})

    set_group(session, "rollout", generate=generate)
    set_group(session, "reward", score=score)
    return session, sizes


def test_prompts_are_drawn_until_the_rewards_of_enough_groups_differ(tmp_path: Path) -> None:
    rounds = [[0.0, 1.0, 1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0]]
    session, sizes = answering(tmp_path, rounds)
    step = session.begin_step(1)
    rollouts = sample_informative_groups(session, step, max_rounds=5)
    assert sizes == [6, 4, 2]  # only the missing groups
    assert rollouts["rewards"].tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert rollouts["group_ids"].unique().numel() == 3
    assert len(set(rollouts["uid"])) == 3  # no prompt twice
    assert step.metrics["sampling/rounds"] == 3
    assert step.metrics["sampling/informative_fraction"] == 0.5
    assert step.metrics["sampling/discarded_groups"] == 3
    assert step.metrics["sampling/filled_groups"] == 0
    assert step.metrics["reward/mean"] == pytest.approx(5 / 12)  # of all that was sampled
    assert (step.progress.prompts_consumed, session.progress.prompts_consumed) == (6, 0)
    assert step.progress.prompts_trained == 0  # not before it is planned for training
    set_group(session, "actor")
    rollouts = rollouts.union({"response_tokens": rollouts["response_lengths"]})
    add_loss_weights(session, step, rollouts, session.actor.plan(rollouts))
    assert step.progress.prompts_trained == step.metrics["prompts_trained"] == 3


def test_missing_groups_are_filled_up_with_uninformative_ones_after_the_last_round(tmp_path: Path) -> None:
    rounds = [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    session, _ = answering(tmp_path, rounds)
    step = session.begin_step(1)
    rollouts = sample_informative_groups(session, step, max_rounds=2)
    assert rollouts.num_rows == 6
    assert rollouts["rewards"].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert step.metrics["sampling/filled_groups"] == 2


class Judge(Worker):
    """Returns the length of each text, in a tensor whose type without rows is another one."""

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        words = torch.tensor([len(text) for text in shard["completion"]])
        rewards = torch.tensor([float(text) for text in shard["completion"]])
        quarantined = torch.zeros(shard.num_rows, dtype=torch.bool)
        return shard.keep([]).union({"rewards": rewards, "words": words, "quarantined": quarantined})


def test_a_round_of_which_batching_drops_all_rows_counts_as_uninformative(tmp_path: Path) -> None:
    session = session_of(tmp_path, recipe="dapo", trainer=Trainer(prompts_per_step=2, group_size=2))
    texts = [["0", "1", "1", "1"], ["0", "1"], ["0", "1"]]
    sizes: list[int] = []

    def generate(prompts: BatchedDataDict, params: object) -> BatchedDataDict:
        sizes.append(prompts.num_rows)
        length = 40 if len(sizes) == 2 else 4  # the second round is over the judge's budget
        made = tiny_rollouts([(3, length)] * prompts.num_rows).drop(["group_ids", "uid"])
        return prompts.keep(["group_ids", "uid"]).union({**made, "completion": texts[len(sizes) - 1]})

    set_group(session, "rollout", generate=generate)
    judge = WorkerGroup("reward", LocalRanks([Judge]), Batching(max_tokens=20, overlong="drop"))
    session.groups["reward"] = cast(Any, judge)
    rollouts = sample_informative_groups(session, session.begin_step(1), max_rounds=4)
    assert sizes == [4, 2, 2]
    assert rollouts["rewards"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert rollouts["valid"].all()
    assert rollouts["words"].tolist() == [1, 1, 1, 1]


def test_length_penalties_alone_make_no_group_informative(tmp_path: Path) -> None:
    session, sizes = answering(tmp_path, [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    step = session.begin_step(1)
    rollouts = sample_informative_groups(session, step, max_rounds=5, overlong_buffer=5, overlong_penalty=0.5)
    assert sizes == [6, 4]
    assert rollouts["rewards"].tolist() == [0.0, 0.5, 0.0, 0.5, 1.0, -0.5]  # every second response has all ten tokens
    assert step.metrics["sampling/informative_fraction"] == 0.6


def test_a_penalty_that_makes_the_rewards_of_a_group_equal_does_not_discard_it(tmp_path: Path) -> None:
    session, sizes = answering(tmp_path, [[0.0, 0.5] * 3])
    rollouts = sample_informative_groups(
        session, session.begin_step(1), max_rounds=5, overlong_buffer=5, overlong_penalty=0.5
    )
    assert (sizes, rollouts["rewards"].tolist()) == ([6], [0.0] * 6)


def test_groups_that_fill_up_a_batch_have_no_length_penalty(tmp_path: Path) -> None:
    session, _ = answering(tmp_path, [[1.0, 1.0, 1.0, 1.0, 0.0, 1.0]])
    step = session.begin_step(1)
    rollouts = sample_informative_groups(session, step, max_rounds=1, overlong_buffer=5, overlong_penalty=0.5)
    assert rollouts["rewards"].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.5]  # every second response has all ten tokens
    assert step.metrics["reward/mean"] == pytest.approx(4.5 / 6)
    assert step.metrics["sampling/filled_groups"] == 2


@pytest.mark.parametrize(("enabled", "shares"), [(True, [0.25, 0.0]), (False, [1 / 14, 1 / 14])])
def test_truncated_responses_are_excluded_from_training_if_configured(
    tmp_path: Path, enabled: bool, shares: list[float]
) -> None:
    session = session_of(tmp_path, recipe="dapo")
    rollouts = tiny_rollouts([(3, 4), (3, 10)]).drop(["finish_reason"])
    rollouts = rollouts.union({"finish_reason": ["stop", "length"], "response_tokens": torch.tensor([4, 10])})
    set_group(session, "actor")
    step = session.begin_step(1)
    filtered = filter_overlong(step, rollouts, enabled=enabled).union({"valid": torch.ones(2, dtype=torch.bool)})
    weighted = add_loss_weights(session, step, filtered, session.actor.plan(filtered))
    assert weighted["token_weight"].tolist() == pytest.approx(shares)
    assert weighted["response_tokens"].tolist() == [4, 10]  # advantages still read it
    assert step.metrics.get("sampling/overlong_filtered", 0.0) == float(enabled)


def test_responses_are_compared_with_the_greedy_one_of_their_prompt(tmp_path: Path) -> None:
    session, _ = answering(tmp_path, [[0.25, float("nan"), 0.75]])
    broken = torch.tensor([False, True, False])
    set_group(
        session,
        "reward",
        score=lambda batch: batch.keep([]).union(
            {"rewards": torch.tensor([0.25, torch.nan, 0.75]), "quarantined": broken}
        ),
    )
    greedy, step = PendingRewards(session.scorers), session.begin_step(1)
    generate_greedily(session, step, draw_prompts(session, step), greedy.submit)
    rollouts = tiny_rollouts([(2, 4)] * 6).union({"valid": torch.tensor([True] * 5 + [False])})
    compared = collect_greedy_rewards(session, step, rollouts, greedy)
    assert compared["greedy_rewards"].tolist() == [0.25, 0.25, 0.0, 0.0, 0.75, 0.75]
    assert compared["valid"].tolist() == [True, True, False, False, True, False]
    assert step.metrics["reward/greedy_mean"] == 0.5
