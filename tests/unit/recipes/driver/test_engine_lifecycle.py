"""When engines that share GPUs wake and sleep."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlpack.config.schema import Placement, Pool, Rollout
from rlpack.distributed.context import RankContext
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.recipes.driver.engine_lifecycle import engines_awake, wake_engines
from rlpack.recipes.driver.rollout_stages import draw_prompts, generate
from rlpack.recipes.driver.session import Session
from rlpack.rollout.canary import canary_tolerance
from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.errors import EngineDeadlineError
from rlpack.testing.local_ranks import LocalRanks
from rlpack.workers.build import build_model
from rlpack.workers.rollout import RolloutWorker
from tests.unit.recipes.driver.sessions import session_of, set_group
from tests.unit.rollout.streaming import StreamingHF


def shared_gpus(folder: Path, *, gpus: float = 1.0, **rollout: Any) -> Session:
    pools = {"main": Pool(ranks=1, gpus_per_rank=gpus)}
    return session_of(folder, rollout=Rollout(engine="vllm", **rollout), placement=Placement(pools=pools))


class Channel:
    """Records publications; `publish` is called for each."""

    def __init__(self, publish: Callable[[], None] = lambda: None) -> None:
        self.canaries: list[tuple[int, ...]] = []
        self._publish = publish

    def publish_again(self, canary: Any) -> float:
        self.canaries.append(tuple(canary.shape))
        self._publish()
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
    group = set_group(session, "rollout", wake=False, sleep=(9, 4), replace_failed_engine=False)
    with engines_awake(session, session.begin_step(1)):
        assert len(channel.canaries) == 1
    assert group.called == ["wake", "replace_failed_engine", "sleep"]


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


AWAKE, ASLEEP = 100, 1


class GpuEngine(StreamingHF):
    """Holds memory, and hangs in some call: `generate`, after which it never answers, `sleep` or `wake`.

    A call that it has to answer kills it at its deadline, as `VLLMEngine` does.
    """

    hangs_in = ""
    memory, has_weights = AWAKE, True

    def finished(self, timeout_s: float) -> list[FinishedRow]:
        if self.hangs_in != "generate":
            assert self.memory == AWAKE
            assert self.has_weights
            return super().finished(timeout_s)
        rows, self.rows = vars(self).get("rows", {}), {}
        return [FinishedRow(key, None, "no response within rollout.request_timeout_s") for key in rows]

    def sleep(self) -> None:
        self._answer("sleep", ASLEEP)

    def wake(self) -> bool:
        self._answer("wake", AWAKE)
        return True

    def close(self) -> None:
        super().close()
        self.memory = 0

    def _answer(self, call: str, memory: int) -> None:
        if self.hangs_in in (call, "generate") or not self.is_alive:
            self.close()
            raise EngineDeadlineError(f"vLLM did not {call} in time")
        self.memory = memory


def colocated(folder: Path, hangs_in: str) -> tuple[Session, list[list[GpuEngine]]]:
    """Return a session with two ranks of which the second one's engine hangs, and the engines of each rank."""
    session = shared_gpus(folder, max_new_tokens=2)
    trainer = session.config.trainer.model_copy(update={"prompts_per_step": 2, "group_size": 2})
    session.config.__dict__["trainer"] = trainer  # a copy: configs share their defaults
    model = build_model(session.config.model, session.tokenizer, RankContext(), seed=3, attention_name="sdpa")
    engines: list[list[GpuEngine]] = [[], []]

    def worker(context: RankContext) -> RolloutWorker:
        def rebuild() -> GpuEngine:
            engines[context.rank].append(GpuEngine(model))
            engines[context.rank][-1].memory, engines[context.rank][-1].has_weights = ASLEEP, False
            return engines[context.rank][-1]

        engines[context.rank].append(GpuEngine(model))
        given = (context, engines[context.rank][0], session.tokenizer)
        return RolloutWorker(*given, canary_tolerance=canary_tolerance(torch.float32), rebuild=rebuild)

    engine_ranks = LocalRanks([worker, worker])
    session.groups["rollout"] = WorkerGroup("rollout", engine_ranks, Batching(max_tokens=64))
    engines[1][0].hangs_in = hangs_in
    return session, engines


@pytest.mark.parametrize("hangs_in", ["generate", "sleep", "wake"])
def test_an_engine_that_hangs_leaves_its_memory_to_the_trainer_and_is_replaced_before_the_next_generation(
    tmp_path: Path, hangs_in: str
):
    session, engines = colocated(tmp_path, hangs_in)

    def publish() -> None:
        for own in engines:
            own[-1].memory, own[-1].has_weights = AWAKE, True

    vars(session)["rollout_weights"] = Channel(publish)
    for number in (1, 2):
        step = session.begin_step(number)
        with engines_awake(session, step):
            rollouts = generate(session, step, draw_prompts(session, step))
        assert rollouts.num_rows == session.config.trainer.prompts_per_step * session.config.trainer.group_size
        for own in engines:
            assert [engine.memory for engine in own] in ([ASLEEP], [0], [0, ASLEEP]), "a trainer would lack memory"
    assert [len(own) for own in engines] == [1, 2]
    assert session.engine_access.failed == frozenset()
    assert session.engine_access.pop_metrics() == {"rollout/engines_replaced": 1.0}
