from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Reward
from rlpack.config.sections.submission import Submission
from rlpack.distributed.context import RankContext
from rlpack.rewards.errors import TooManyFailuresError
from rlpack.rewards.pool import landlock
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


@pytest.mark.parametrize(("version", "warnings"), [(0, 1), (6, 0)])
def test_one_warning_says_what_the_kernel_cannot_enforce(version, warnings, monkeypatch, caplog):
    monkeypatch.setattr(landlock, "abi_version", lambda: version)
    with started(function=FINAL):
        pass
    assert len(caplog.records) == warnings
    if warnings:
        assert "reward.sandbox=limits is incomplete on this machine: functions can read credentials" in caplog.text


def test_the_run_and_secrets_are_hidden_from_functions(tmp_path):
    for name in ("runs/mine/config.yaml", "secrets/KEY", "data/rows"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("text")
    config = tiny_config(
        reward=Reward(function="tests.unit.rewards.samples:is_readable"),
        run_dir=str(tmp_path / "runs" / "mine"),
        job=Submission(secrets_dir=str(tmp_path / "secrets")),
    )
    worker = RewardWorker.from_settings(RankContext(), config, tiny_tokenizer())
    paths = [str(tmp_path / name) for name in ("runs/mine/config.yaml", "secrets/KEY", "data/rows")]
    found = worker.score(BatchedDataDict({"prompt": [""] * 3, "completion": paths, "answer": [""] * 3}))
    worker.close()
    assert found["rewards"].tolist() == [0.0, 0.0, 1.0]
