from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Reward
from rlpack.distributed.context import RankContext
from rlpack.rewards.errors import TooManyFailuresError
from rlpack.rewards.reward_result import FAILURES
from rlpack.workers.reward import RewardWorker
from tests.builders import tiny_config, tiny_tokenizer

FINAL = "rlpack.rewards.functions:final_answer"
TEXTS = {"prompt": ["1+1=", "2+2=", "3+3="], "completion": ["#2", "#5", "#6"], "answer": ["2", "4", "6"]}


@contextmanager
def started(**settings: Any) -> Iterator[RewardWorker]:
    config = tiny_config(reward=Reward(**settings))
    worker = RewardWorker.from_settings(RankContext(), config, tiny_tokenizer())
    try:
        yield worker
    finally:
        worker.close()


def test_each_row_gets_the_reward_of_its_text_and_keeps_its_id():
    with started(function=FINAL) as worker:
        found = worker.score(BatchedDataDict(TEXTS).select([2, 0, 1]))
        assert worker.score(BatchedDataDict({name: [] for name in TEXTS})).num_rows == 0
    assert found["rewards"].tolist() == [1.0, 1.0, 0.0]
    assert found["quarantined"].tolist() == [False, False, False]
    assert found.row_ids.tolist() == [2, 0, 1]
    assert sorted(found) == ["quarantined", "reward_failure", "reward_output_bytes", "rewards"]


def test_arguments_reach_the_function():
    with started(function=FINAL, arguments={"marker": "="}) as worker:
        found = worker.score(BatchedDataDict({"prompt": ["", ""], "completion": ["=4", "#4"], "answer": ["4", "4"]}))
    assert found["rewards"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("sandbox", ["limits", "strict"])
def test_several_functions_are_summed_and_each_has_its_column(sandbox: str):
    functions = {
        "exact": {"function": FINAL, "weight": 2.0},
        "other": {"function": "tests.unit.rewards.samples:seldom", "weight": 0.5, "timeout_s": 5.0},
    }
    with started(**Reward.model_validate({"functions": functions, "sandbox": sandbox}).model_dump()) as worker:
        found = worker.score(BatchedDataDict(TEXTS | {"completion": ["#2", "text", "nan"]}))
    assert found["rewards"].tolist() == [2.25, 0.0, 0.0]
    assert found["quarantined"].tolist() == [False, True, True]
    assert found["reward_failure"].tolist() == [0, 1 + FAILURES.index("invalid"), 0]
    assert found["reward_exact"].tolist() == [1.0, 0.0, 0.0]
    assert found["reward_other"].isnan().tolist() == [False, True, True]


def test_a_function_that_is_wrong_is_named():
    texts = BatchedDataDict({"prompt": ["p"] * 16, "completion": ["c"] * 16})
    with (
        started(function="tests.unit.rewards.samples:short") as worker,
        pytest.raises(TooManyFailuresError, match=r"samples:short on row 0: invalid \(returned 1 rewards for \d+ rows"),
    ):
        worker.score(texts)
