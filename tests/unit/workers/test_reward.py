from collections.abc import Sequence

import pytest

from rlpack.config.schema import Reward
from rlpack.data.batch import BatchedDataDict
from rlpack.distributed.context import RankContext
from rlpack.rewards.errors import RewardError
from tests.builders import tiny_config, tiny_tokenizer
from workers.reward import RewardWorker

TEXTS = {"prompt": ["1+1=", "2+2=", "3+3="], "completion": ["#2", "#5", "#6"], "answer": ["2", "4", "6"]}


def sparse(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str]) -> list[float | None]:
    return [1.0, None, float("nan")]


def short(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [1.0]


def worker(function: str, **arguments: object) -> RewardWorker:
    config = tiny_config(reward=Reward(function=function, arguments=arguments))
    return RewardWorker.from_settings(RankContext(), config, tiny_tokenizer())


def test_each_row_gets_the_reward_of_its_text_and_keeps_its_id():
    found = worker("rlpack.rewards.functions:final_answer").score(BatchedDataDict(TEXTS).select([2, 0, 1]))
    assert found["rewards"].tolist() == [1.0, 1.0, 0.0]
    assert found["quarantined"].tolist() == [False, False, False]
    assert (found.row_ids.tolist(), sorted(found)) == ([2, 0, 1], ["quarantined", "rewards"])


def test_arguments_reach_the_function():
    found = worker("rlpack.rewards.functions:final_answer", marker="=").score(
        BatchedDataDict({"prompt": ["", ""], "completion": ["=4", "#4"], "answer": ["4", "4"]})
    )
    assert found["rewards"].tolist() == [1.0, 0.0]


def test_rows_without_a_finite_reward_are_quarantined():
    found = worker("tests.unit.workers.test_reward:sparse").score(BatchedDataDict(TEXTS))
    assert found["rewards"].tolist() == [1.0, 0.0, 0.0]
    assert found["quarantined"].tolist() == [False, True, True]


def test_no_rows_give_no_rewards():
    empty = BatchedDataDict({name: [] for name in TEXTS})
    assert worker("rlpack.rewards.functions:final_answer").score(empty).num_rows == 0


def test_a_function_that_is_wrong_is_named():
    with pytest.raises(RewardError, match="test_reward:short returned 1 rewards for 3 rows"):
        worker("tests.unit.workers.test_reward:short").score(BatchedDataDict(TEXTS))
    with pytest.raises(RewardError, match="no_such"):
        worker("rlpack.rewards.functions:no_such")
