import logging

import pytest
import torch

from rlpack.batch.store import LocalStore
from rlpack.config.schema import Actor, Rollout
from rlpack.recipes.driver.logprob_gap import LogprobGapLimit
from rlpack.rollout.errors import LogprobGapError
from tests.builders import tiny_config, tiny_rollouts


def scored_rows():
    """Return rows of 3, 4 and 2 response tokens; in row 1 the trainer's log-prob of one token is 9 nats lower."""
    rollouts = tiny_rollouts([(2, 3), (3, 4), (1, 2)])
    sampled = rollouts["rollout_logprobs"]
    own = sampled.values.clone()
    position = int(sampled.lengths[0]) + 5  # the third response token of row 1
    own[position] -= 9.0
    columns = {
        "logprobs": sampled.with_values(own),
        "logprob_gap": torch.tensor([0.0, 9.0, 0.0], dtype=torch.float64),
        "response_tokens": torch.tensor([3, 4, 2]),
    }
    return rollouts.union(columns), int(rollouts["input_ids"][1][5])


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 0.05),
        ({"actor": Actor(precision="bf16")}, 0.3),
        ({"rollout": Rollout(top_k=20)}, None),
        ({"rollout": Rollout(top_p=0.9)}, None),
        ({"rollout": Rollout(top_k=20, max_logprob_gap=0.7)}, 0.7),
        ({"rollout": Rollout(max_logprob_gap=0.01)}, 0.01),
    ],
)
def test_the_limit_follows_precision_and_filters_unless_set(changes, limit):
    assert LogprobGapLimit.from_config(tiny_config(**changes)).limit == limit


def test_a_gap_of_stale_responses_is_warned_of_once_above_ten_times_the_limit(caplog):
    limit = LogprobGapLimit(0.05)
    for step, gap in enumerate([0.3, 0.5, 0.51, float("nan"), 0.6], 1):
        limit.check_lagged(gap, step, lag=2)
    LogprobGapLimit(None).check_lagged(9.0, 1, lag=1)
    (record,) = caplog.records
    assert "step 3: " in record.getMessage()
    assert "0.51 nats on average, over 10 times the limit of 0.05, and the responses are up to 2" in record.getMessage()


def test_a_gap_over_the_limit_is_warned_of_once_and_names_the_key(caplog):
    limit = LogprobGapLimit(0.05)
    with caplog.at_level(logging.WARNING):
        for step, gap in enumerate([0.05, 0.06, 0.49, 0.06], 1):
            limit.check(gap, None, LocalStore(), step)
    (record,) = caplog.records
    assert "step 2: " in record.getMessage()
    assert "0.06 nats" in record.getMessage()
    assert "rollout.max_logprob_gap" in record.getMessage()


@pytest.mark.parametrize("gap", [0.51, float("inf"), float("nan")])
def test_ten_times_the_limit_ends_the_run_and_names_the_worst_row_and_token(gap):
    scored, token = scored_rows()
    limit = LogprobGapLimit(0.05)
    assert limit.is_fatal(gap)
    with pytest.raises(
        LogprobGapError, match=rf"over 10 times the limit of 0\.05; most in row 1 .*: token {token} at 5 "
    ):
        limit.check(gap, scored, LocalStore(), 3)


def test_no_limit_checks_nothing():
    limit = LogprobGapLimit(None)
    assert not limit.is_fatal(100.0)
    limit.check(100.0, None, LocalStore(), 1)
