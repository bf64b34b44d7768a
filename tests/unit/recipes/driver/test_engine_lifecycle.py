"""When engines that share GPUs wake and sleep."""

from pathlib import Path
from typing import Any, cast

import pytest

from rlpack.config.schema import Placement, Pool, Rollout
from rlpack.recipes.driver.engine_lifecycle import engines_awake, wake_engines
from rlpack.recipes.driver.session import Session
from tests.unit.recipes.driver.sessions import session_of, set_group


def shared_gpus(folder: Path, *, gpus: float = 1.0, **rollout: Any) -> Session:
    pools = {"main": Pool(ranks=1, gpus_per_rank=gpus)}
    return session_of(folder, rollout=Rollout(engine="vllm", **rollout), placement=Placement(pools=pools))


class Channel:
    """Records publications."""

    def __init__(self) -> None:
        self.canaries: list[tuple[int, ...]] = []

    def publish_again(self, canary: Any) -> float:
        self.canaries.append(tuple(canary.shape))
        return 0.0


def test_engines_are_woken_before_a_block_and_sleep_after_it(tmp_path: Path):
    session = shared_gpus(tmp_path)
    group = set_group(session, "rollout", wake=True, sleep=(9, 4))
    step = session.begin_step(1)
    with engines_awake(session, step):
        assert group.called == ["wake"]
    assert group.called == ["wake", "sleep"]
    assert step.metrics["rollout/gpu_bytes_awake"] == 9.0
    assert step.metrics["rollout/gpu_bytes_asleep"] == 4.0
    assert {"time/wake_s", "time/sleep_s"} <= step.timer.as_metrics().keys()


def test_engines_whose_weights_are_gone_get_them_again_before_the_block(tmp_path: Path):
    session = shared_gpus(tmp_path, sleep_level=2)
    channel = vars(session)["rollout_weights"] = Channel()
    group = set_group(session, "rollout", wake=False, sleep=(9, 4))
    with engines_awake(session, session.begin_step(1)):
        assert len(channel.canaries) == 1
    assert group.called == ["wake", "sleep"]


def test_engines_stay_awake_after_an_evaluation_since_generation_follows(tmp_path: Path):
    session = shared_gpus(tmp_path)
    group = set_group(session, "rollout", wake=True)
    wake_engines(session, session.begin_step(1))
    assert group.called == ["wake"]


@pytest.mark.parametrize("settings", [{"gpus": 0.0}, {"sleep_level": 0}], ids=["CPUs", "level 0"])
def test_engines_that_never_sleep_are_not_called(tmp_path: Path, settings: dict[str, Any]):
    session = shared_gpus(tmp_path, **settings)
    group, step = set_group(session, "rollout"), cast(Any, None)
    with engines_awake(session, step):
        wake_engines(session, step)
    assert group.called == []


def test_engines_of_a_block_that_fails_are_left_as_they_are(tmp_path: Path):
    session = shared_gpus(tmp_path)
    group = set_group(session, "rollout", wake=True)
    with pytest.raises(ZeroDivisionError), engines_awake(session, session.begin_step(1)):
        raise ZeroDivisionError
    assert group.called == ["wake"]
