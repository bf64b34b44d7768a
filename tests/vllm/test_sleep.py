"""Engines that sleep refuse requests, and wake in the order that needs the least memory.

On a CPU vLLM frees nothing, but takes the same calls and holds back the same requests; tests/gpu measures memory.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlpack.batch.bucket import pack_bucket
from rlpack.distributed.context import RankContext
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import TOLERANCES
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.sleep_cycle import SleepCycle
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.workers.rollout import RolloutWorker
from tests.vllm.engines import CANARY, TOKENIZER, gap, policy, prompts_of, reference, sampled, send

PARAMS = SamplingParams(max_new_tokens=3)


class RecordingFrontEnd:
    """vLLM's front end; records which calls are made."""

    def __init__(self, front_end: Any) -> None:
        self.front_end, self.calls = front_end, []

    def __getattr__(self, name: str) -> Any:
        method = vars(type(self.front_end))[name].__get__(self.front_end)

        def record(*args: Any) -> Any:
            plain = [str(given) for given in args if isinstance(given, int | list)]
            self.calls.append(" ".join([name, *plain]))
            return method(*args)

        return record


@pytest.fixture(params=[1, 2])
def front_end(shared_engine: VLLMEngine, request: pytest.FixtureRequest) -> Iterator[RecordingFrontEnd]:
    """Let the engine sleep at a level, and record the calls."""
    recording, cycle = RecordingFrontEnd(shared_engine._engine), shared_engine._cycle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_engine, "_cycle", SleepCycle(recording, shared_engine._control, request.param))
        patch.setattr(shared_engine._sender, "_front_end", recording)
        send(shared_engine, policy("qwen2", tied=False, seed=50))
        recording.calls.clear()
        yield recording
        if not shared_engine.wake():
            send(shared_engine, policy("qwen2", tied=False, seed=50))
    assert cycle is shared_engine._cycle


def is_asleep(engine: VLLMEngine) -> bool:
    return engine._control(engine._engine.is_sleeping(), "say whether it sleeps")


def test_an_engine_that_sleeps_refuses_requests_at_once(shared_engine: VLLMEngine, front_end: RecordingFrontEnd):
    shared_engine.sleep()
    assert is_asleep(shared_engine)
    words = r"^the engine sleeps \(weights and kv_cache\), .* `with engines_awake\(session, step\):`"
    with pytest.raises(EngineError, match=words):
        sampled(shared_engine, prompts_of(3), PARAMS)
    with pytest.raises(EngineError, match=words):
        shared_engine.logprobs(CANARY)
    shared_engine.sleep()
    assert len(front_end.calls) == 1


@pytest.mark.parametrize("front_end", [1], indirect=True)
def test_an_engine_that_keeps_its_weights_wakes_as_it_was(shared_engine: VLLMEngine, front_end: RecordingFrontEnd):
    before = sampled(shared_engine, prompts_of(3, 5), PARAMS)
    shared_engine.sleep()
    assert shared_engine.wake()
    assert front_end.calls == ["sleep 1", "wake_up ['weights']", "wake_up ['kv_cache']"]
    assert not is_asleep(shared_engine)
    after = sampled(shared_engine, prompts_of(3, 5), PARAMS)
    assert after.token_ids.values.equal(before.token_ids.values)
    assert after.logprobs.values.equal(before.logprobs.values)
    assert shared_engine.wake()
    assert len(front_end.calls) == 3


def test_an_update_wakes_the_weights_before_its_first_bucket_and_the_cache_after_its_last(
    shared_engine: VLLMEngine, front_end: RecordingFrontEnd
):
    built = policy("qwen2", tied=False, seed=51)
    shared_engine.sleep()
    send(shared_engine, built)
    assert front_end.calls[1:3] == ["wake_up ['weights']", "start_weight_update"]
    assert front_end.calls[-2:] == ["finish_weight_update", "wake_up ['kv_cache']"]
    assert set(front_end.calls[3:-2]) == {"update_weights"}
    assert not is_asleep(shared_engine)
    assert gap(shared_engine, built) <= 1e-4
    sampled(shared_engine, prompts_of(3), PARAMS)


@pytest.mark.parametrize("front_end", [2], indirect=True)
def test_discarded_weights_come_back_by_a_publication_alone(shared_engine: VLLMEngine, front_end: RecordingFrontEnd):
    built = policy("qwen2", tied=False, seed=52)
    worker = RolloutWorker(RankContext(), shared_engine, TOKENIZER, canary_tolerance=TOLERANCES[torch.float32])
    stream = WeightStream(built, torch.float32)
    worker.check_weights(stream.layout)
    assert worker.sleep() == (0, 0)
    assert worker.wake() is False
    assert front_end.calls == ["sleep 2"]
    with pytest.raises(EngineError, match="the engine discarded its weights to sleep"):
        worker._received.check_usable()
    with pytest.raises(EngineError, match="the engine sleeps"):
        sampled(shared_engine, prompts_of(3), PARAMS)
    for index, weights in enumerate(stream):
        worker.load_bucket(pack_bucket(weights, index=index, count=len(stream.layout), version=1), 1)
    assert worker.wake() is False  # they are loaded, and not checked yet
    assert worker.publish(reference(built, CANARY).numpy(), CANARY, 1) <= 1e-4
    assert worker.wake() is True
    worker._received.check_usable()


def test_an_update_that_stops_halfway_leaves_an_engine_that_refuses_requests_until_the_next_is_complete(
    shared_engine: VLLMEngine, front_end: RecordingFrontEnd
):
    built = policy("qwen2", tied=False, seed=53)
    stream = WeightStream(built, torch.float32, bucket_bytes=200_000)
    shared_engine.sleep()
    shared_engine.check_weights(stream.layout)
    shared_engine.load_bucket(stream.gather(0))
    with pytest.raises(EngineError, match=r"the engine sleeps \(kv_cache\)"):
        sampled(shared_engine, prompts_of(3), PARAMS)
    send(shared_engine, built)
    assert gap(shared_engine, built) <= 1e-4
