"""Rows are answered once, whatever vLLM does with their requests."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm import row_requests
from rlpack.rollout.vllm.row_requests import RefusedError, Row, RowRequests

PARAMS = SamplingParams(max_new_tokens=4)


class SimulatedVLLM:
    """Runs requests until they are aborted; one that is on its way when others are aborted arrives later."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Any]] | None = None, *, keeps_cache: bool = False) -> None:
        self.rows, self.salts = RowRequests(self, self.ask, str), list[str]()
        self.rows.keeps_cache = keeps_cache
        self.arrives, self.paused = asyncio.Event(), asyncio.Event()
        self.running: list[asyncio.Future[str]] = []
        self.aborts, self._ask, self.prompts = 0, ask, list[list[int]]()

    async def ask(self, prompt: dict[str, Any], sampling: dict[str, Any]) -> Any:
        self.prompts.append(prompt["prompt_token_ids"])
        self.salts.append(prompt["cache_salt"])
        if self._ask is not None:
            await self._ask()
        await self.arrives.wait()
        future = asyncio.get_running_loop().create_future()
        self.running.append(future)
        reason = await future
        output = SimpleNamespace(token_ids=[9], finish_reason=reason, logprobs=None, weight_versions=[])
        return SimpleNamespace(outputs=[output])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.aborts += 1
        self.paused.set()
        self.end("abort")

    async def resume_generation(self) -> None:
        self.arrives.set()

    def end(self, reason: str) -> None:
        for future in self.running:
            future.set_result(reason)
        self.running.clear()


async def begun(vllm: SimulatedVLLM) -> None:
    await vllm.rows.begin([Row(3, np.array([5, 6]), 1, PARAMS)], version=1)
    await asyncio.sleep(0)


def test_a_request_that_was_on_its_way_is_aborted_too_and_continued(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_requests, "_ABORT_S", 0.02)
    monkeypatch.setattr(row_requests, "_CONTROL_S", 4.0)

    async def scenario() -> None:
        vllm = SimulatedVLLM()
        await begun(vllm)
        await vllm.rows.interrupt()
        assert vllm.aborts == 2
        assert not vllm.running
        await vllm.rows.resume(2)
        await asyncio.sleep(0.01)
        assert vllm.prompts == [[5, 6], [5, 6, 9]]
        vllm.end("length")
        await asyncio.sleep(0.01)
        row = vllm.rows.finished(0.0)[0]
        assert (row.key, row.failure, row.response.token_ids, row.policy_version) == (3, "", [9, 9], 2)

    asyncio.run(scenario())


def test_requests_that_do_not_end_are_an_error_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_requests, "_ABORT_S", 0.01)
    monkeypatch.setattr(row_requests, "_CONTROL_S", 0.1)

    async def scenario() -> None:
        vllm = SimulatedVLLM(asyncio.Event().wait)
        await begun(vllm)
        with pytest.raises(EngineError, match=r"did not end 1 interrupted requests within 0\.05 s"):
            await vllm.rows.interrupt()

    asyncio.run(asyncio.wait_for(scenario(), 10.0))


def test_a_request_that_reaches_a_paused_vllm_is_sent_again_after_the_interruption():
    async def refused_once() -> None:  # as by vLLM from 0.33 on: it is on its way until the pause
        if len(vllm.prompts) == 1:
            await vllm.paused.wait()
            raise RefusedError("vLLM refused request 1: generation is paused")

    async def scenario() -> None:
        await begun(vllm)
        await vllm.rows.interrupt()
        assert vllm.rows.finished(0.0) == []
        await vllm.rows.resume(2)
        await asyncio.sleep(0.01)
        vllm.end("length")
        await asyncio.sleep(0.01)
        row = vllm.rows.finished(0.0)[0]
        assert (row.failure, row.response.token_ids, row.policy_version) == ("", [9], 2)
        assert vllm.prompts == [[5, 6], [5, 6]]

    vllm = SimulatedVLLM(refused_once)
    asyncio.run(asyncio.wait_for(scenario(), 10.0))


def test_a_request_that_vllm_refuses_without_an_interruption_is_a_failed_row():
    async def refused() -> None:
        raise RefusedError("vLLM refused request 1: too busy")

    async def scenario() -> None:
        vllm = SimulatedVLLM(refused)
        await begun(vllm)
        await asyncio.sleep(0.01)
        rows = vllm.rows.finished(0.0)
        assert [(row.key, row.failure) for row in rows] == [(3, "vLLM refused request 1: too busy")]

    asyncio.run(scenario())


def test_a_request_that_vllm_cancels_is_a_failed_row_and_one_that_is_cancelled_here_is_none():
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def scenario() -> None:
        vllm = SimulatedVLLM(cancelled)
        await begun(vllm)
        await asyncio.sleep(0.01)
        rows = vllm.rows.finished(0.0)
        assert [(row.key, row.failure) for row in rows] == [(3, "vLLM cancelled a request at policy version 1")]
        other = SimulatedVLLM()
        await begun(other)
        await other.rows.cancel()
        assert other.rows.finished(0.0) == []

    asyncio.run(scenario())


@pytest.mark.parametrize(("keeps_cache", "salts"), [(False, ["1", "2", "3"]), (True, ["1", "1", "1"])])
def test_a_row_that_goes_on_finds_its_keys_and_values_only_if_they_are_kept(keeps_cache: bool, salts: list[str]):
    async def scenario() -> None:
        vllm = SimulatedVLLM(keeps_cache=keeps_cache)
        vllm.arrives.set()
        await begun(vllm)
        for version in (2, 3):
            await vllm.rows.interrupt()
            await vllm.rows.resume(version)
            await asyncio.sleep(0.01)
        assert vllm.salts == salts
        await vllm.rows.begin([Row(4, np.array([5, 6]), 1, PARAMS)], version=3)
        await asyncio.sleep(0.01)
        assert vllm.salts[-1] == "3", "a new row has the keys and values of the newest weights"
        await vllm.rows.cancel()

    asyncio.run(scenario())


def test_some_rows_are_cancelled_and_the_others_go_on():
    async def scenario() -> None:
        vllm = SimulatedVLLM()
        vllm.arrives.set()
        await vllm.rows.begin([Row(key, np.array([5, key]), 1, PARAMS) for key in (3, 4, 5)], version=1)
        await asyncio.sleep(0.01)
        cancelled, *left = vllm.running
        await vllm.rows.cancel([3])
        assert cancelled.cancelled()
        vllm.running = left
        vllm.end("length")
        await asyncio.sleep(0.01)
        assert sorted(row.key for row in vllm.rows.finished(0.0)) == [4, 5]
        assert vllm.rows._tasks == {}

    asyncio.run(scenario())
