"""An engine that hangs in a call is killed at a deadline and replaced, like one that died."""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import pack_bucket
from rlpack.config.schema import Placement
from rlpack.distributed.context import RankContext
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import TOLERANCES
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.sleep_cycle import SleepCycle
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.workers.rollout import RolloutWorker
from tests.vllm.engines import CANARY, TOKENIZER, policy, prompts_of, reference, sampled, start

CALL_S = 12.0  # so vLLM has 6 s for each of its calls
GRACE_S = 2.0
REQUEST_S, LONG_S = 3.0, 300.0
SECOND = SamplingParams(max_new_tokens=2)


def engine() -> VLLMEngine:
    return start("qwen2", tied=False, placement=Placement(call_timeout_s=CALL_S))


def has_ended(process: BaseProcess) -> bool:
    """Return whether a process is gone.

    While another thread, such as vLLM's monitor, waits for it too, `is_alive` may still return True for a moment.
    """
    return not psutil.pid_exists(cast(int, process.pid))


@pytest.fixture(scope="module")
def worker() -> Iterator[RolloutWorker]:
    tolerance = TOLERANCES[torch.float32]
    worker = RolloutWorker(RankContext(), engine(), TOKENIZER, canary_tolerance=tolerance, rebuild=engine)
    yield worker
    worker._engine.close()


def publish(worker: RolloutWorker, built: Policy, version: int, *, before: Callable[[str], None], again: bool) -> float:
    """Publish a policy's weights as the driver does; `before` is called before each bucket and before the canary."""
    stream = WeightStream(built, torch.float32, bucket_bytes=200_000)
    worker.check_weights(stream.layout)
    for index, weights in enumerate(stream):
        before(f"bucket {index}")
        worker.load_bucket(pack_bucket(weights, index=index, count=len(stream.layout), version=version), version)
    before("the end")
    return worker.publish(reference(built, CANARY).numpy(), CANARY, version, not again)


def nothing(place: str) -> None:
    """Let the publication go on."""


@pytest.mark.parametrize("hangs_at", ["bucket 0", "bucket 2", "the end", "the canary"])
def test_an_engine_that_hangs_during_a_publication_is_replaced_and_gets_the_weights_again(
    worker: RolloutWorker, hangs_at: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    built, first, version = policy("qwen2", tied=False, seed=61), worker._engine, worker._engine.policy_version + 1
    assert isinstance(first, VLLMEngine)
    (process,) = first._started.processes
    stopped: list[float] = []

    def stop(place: str) -> None:
        if place == hangs_at:
            stopped.append(time.monotonic())
            os.kill(process.pid, signal.SIGSTOP)

    score = first.logprobs
    monkeypatch.setattr(first, "logprobs", lambda tokens: (stop("the canary"), score(tokens))[1])
    with caplog.at_level(logging.WARNING):
        assert publish(worker, built, version, before=stop, again=False) == math.inf
    assert CALL_S / 2 <= time.monotonic() - stopped[0] < CALL_S / 2 + GRACE_S
    assert f"within {CALL_S / 2:g} s (half of placement.call_timeout_s={CALL_S:g})" in caplog.text
    assert not first.is_alive
    assert has_ended(process)
    with pytest.raises(EngineError, match="no usable weights"):
        worker._received.check_usable()
    worker.replace_failed_engine()
    assert publish(worker, built, version, before=nothing, again=True) <= 1e-4
    assert worker._engine is not first
    assert isinstance(worker._engine, VLLMEngine)
    assert sampled(worker._engine, prompts_of(4), SECOND).token_ids.lengths.tolist() == [2]


def test_a_hang_that_may_not_be_replaced_names_its_deadline_and_a_later_call_its_end(worker: RolloutWorker):
    first = worker._engine
    assert isinstance(first, VLLMEngine)
    (process,) = first._started.processes
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"did not take a policy version within 6 s \(half of placement\.call_t"):
        first.policy_version = 99
    began = time.monotonic()
    with pytest.raises(EngineError, match="hung and was killed"):
        sampled(first, prompts_of(4), SECOND)
    assert time.monotonic() - began < GRACE_S
    worker.replace_failed_engine()


@pytest.mark.parametrize("hangs_in", ["generation", "sleep", "waking"])
def test_an_engine_that_hangs_leaves_no_process_when_other_roles_need_its_memory(
    worker: RolloutWorker, hangs_in: str, monkeypatch: pytest.MonkeyPatch
):
    built, first, version = policy("qwen2", tied=False, seed=62), worker._engine, worker._engine.policy_version + 1
    assert isinstance(first, VLLMEngine)
    publish(worker, built, version, before=nothing, again=True)
    (process,) = first._started.processes
    monkeypatch.setattr(first, "_cycle", SleepCycle(first._engine, first._control, 1))
    monkeypatch.setattr(first, "_request_timeout_s", 3.0)
    columns = {"input_ids": prompts_of(4), "seeds": torch.tensor([1]), "group_ids": torch.tensor([0]), "uid": ["one"]}
    if hangs_in == "waking":
        worker.sleep()
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    if hangs_in == "generation":
        ended = worker.advance(BatchedDataDict(columns), SECOND, 0, 0, CALL_S, 0)
        assert ended["engine_has_failed"].tolist() == [True]
        assert process.is_alive()
    if hangs_in != "waking":
        worker.sleep()
    else:
        assert worker.wake() is False
    assert has_ended(process)
    assert time.monotonic() - began < CALL_S
    assert worker.wake() is False
    assert worker.replace_failed_engine()
    assert publish(worker, built, version, before=nothing, again=True) <= 1e-4
    ended = worker.advance(BatchedDataDict(columns), SECOND, 1, 1, CALL_S, 0)
    assert ended["response_lengths"].tolist() == [2]


def test_a_start_that_takes_too_long_names_its_key_and_leaves_no_process():
    began = time.monotonic()
    words = r"did not start within 1\.8 s \(0\.9 of placement\.start_timeout_s=2\); raise the key .*it logged"
    with pytest.raises(EngineError, match=words):
        start("qwen2", tied=False, placement=Placement(start_timeout_s=2.0))
    assert time.monotonic() - began < 15


@pytest.fixture
def short() -> Iterator[VLLMEngine]:
    short = start("qwen2", tied=False, request_timeout_s=REQUEST_S)
    yield short
    short.close()


def begin_two(short: VLLMEngine) -> None:
    """Start two responses that vLLM doesn't finish at once, the second one with a long deadline."""
    params, seeds = SamplingParams(max_new_tokens=100), np.array([1, 2], dtype=np.uint64)
    short.begin([0], prompts_of(4), params, seeds[:1])
    short._request_timeout_s = LONG_S
    short.begin([1], prompts_of(5), params, seeds[1:])


@pytest.mark.parametrize("has_sampled", [True, False])
def test_all_rows_fail_at_once_if_the_process_hangs_at_the_deadline_of_the_first(short: VLLMEngine, has_sampled: bool):
    if has_sampled:  # vLLM leaves requests waiting if its process hangs before the first one
        sampled(short, prompts_of(4), SECOND)
    (process,) = short._started.processes
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    begin_two(short)
    (first,) = short.finished(2 * REQUEST_S)
    assert (first.key, time.monotonic() - began < REQUEST_S + GRACE_S) == (0, True)
    assert "got no response within rollout.request_timeout_s=" in first.failure
    (second,) = short.finished(2 * REQUEST_S)
    assert (second.key, time.monotonic() - began < 2 * REQUEST_S + GRACE_S) == (1, True)
    assert "vLLM's process hung and was killed: a request missed its deadline, and then the pr" in second.failure
    assert not short.is_alive
    assert has_ended(process)


def test_a_request_that_misses_its_deadline_costs_no_other_one_while_the_process_answers(
    short: VLLMEngine, monkeypatch: pytest.MonkeyPatch
):
    ask = short._engine.generate

    async def generate(prompt: Any, sampling_params: Any, name: str, **named: Any) -> AsyncIterator[Any]:
        async for output in ask(prompt, sampling_params, name, **named):
            await asyncio.sleep(REQUEST_S + 1 if len(prompt["prompt_token_ids"]) == 4 else 3 * REQUEST_S)
            yield output

    monkeypatch.setattr(short._engine, "generate", generate)
    begin_two(short)
    ended = {row.key: row for row in (*short.finished(2 * REQUEST_S), *short.finished(3 * REQUEST_S))}
    assert "got no response within" in ended[0].failure
    assert (ended[1].failure, len(ended[1].response.token_ids)) == ("", 100)
    assert short.is_alive
