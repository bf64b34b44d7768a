"""How many restarts a pool may have, and where they are counted."""

import pytest

from rlpack.distributed.errors import RoleError
from rlpack.distributed.restarts import Restarts


def death(role: str = "reward") -> RoleError:
    return RoleError(role, 0, "score", "the process died")


def test_a_pool_may_be_started_again_three_times_in_a_hundred_steps():
    restarts = Restarts()
    for number in (1, 40, 40, 100):
        restarts.begin_step("train", number)
        if number < 100:
            restarts.record(death("judge" if number == 1 else "reward"), "scorers")
    restarts.record(death(), "engines")  # pools are counted one by one
    with pytest.raises(RoleError, match="pool scorers was started again 3 times within 100 steps before"):
        restarts.record(death("verifier"), "scorers")


def test_restarts_of_long_ago_do_not_count():
    restarts = Restarts()
    for number in range(1, 302):
        restarts.begin_step("train", number)
        if number % 34 == 1:  # 1, 35, 69, 103: at most three in a window
            assert restarts.record(death(), "scorers") <= 3
    for number in range(302, 307):
        restarts.begin_step("train", number)
    restarts.record(death(), "scorers")


def test_an_evaluation_belongs_to_its_step():
    restarts = Restarts()
    for phase, number in [("sft_warmup", 1), ("sft_warmup", 1), ("train", 1), ("train", 1)]:
        restarts.begin_step(phase, number)
    assert restarts._step == 2


def test_every_restart_is_in_the_metrics_of_one_step():
    restarts = Restarts()
    assert restarts.pop_metrics() == {}
    for role in ("reward", "judge", "reward"):
        restarts.record(death(role), "scorers")
    restarts.add_seconds(1.5)
    expected = {"faults/restarts/reward": 2.0, "faults/restarts/judge": 1.0, "time/restart_s": 1.5}
    assert restarts.pop_metrics() == expected
    assert restarts.pop_metrics() == {}
