"""Batches that are drawn at the same time, on two engines of which one dies or hangs: their rows are the same."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.distributed.calls import Call, Pending
from rlpack.distributed.context import RankContext
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.engine_restarts import replace_failed_engines
from rlpack.recipes.driver.router import Router
from rlpack.rollout.canary import TOLERANCES
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.testing.local_ranks import LocalRanks
from rlpack.workers.rollout import RolloutWorker
from tests.vllm.engines import TOKENIZER, prompts_of, start

PARAMS = SamplingParams(max_new_tokens=40)
GROUPS, SAMPLES, CAPACITY = 8, 2, 8
TIMEOUT_S, DEADLINE_S = 4.0, 60.0


class TurnedRanks(LocalRanks):
    """Two ranks that run one call at a time, whichever thread it comes from; `before` is called before each."""

    def __init__(self, before: Callable[[Call], None]) -> None:
        self.workers: list[RolloutWorker] = []
        self.lock, self.before = threading.Lock(), before
        super().__init__([self._worker] * 2)

    def _worker(self, context: RankContext) -> RolloutWorker:
        def engine() -> VLLMEngine:
            return start("qwen2", tied=False, request_timeout_s=TIMEOUT_S)

        tolerance = TOLERANCES[torch.float32]
        self.workers.append(RolloutWorker(context, engine(), TOKENIZER, canary_tolerance=tolerance, rebuild=engine))
        return self.workers[-1]

    def submit(self, call: Call) -> Pending[list[Any]]:
        with self.lock:
            self.before(call)
            return super().submit(call)

    def close(self) -> None:
        for worker in self.workers:
            worker._engine.close()


def batch_of(number: int) -> BatchedDataDict:
    size = GROUPS * SAMPLES
    firsts = prompts_of(*range(1, GROUPS + 1), seed=number).rows()
    return BatchedDataDict(
        {
            "input_ids": Ragged.from_rows([firsts[row // SAMPLES] for row in range(size)], torch.int64),
            "uid": [f"{number}-{row // SAMPLES}" for row in range(size)],
            "group_ids": torch.arange(GROUPS).repeat_interleave(SAMPLES),
            "seeds": torch.arange(size) + 1000 * number,
        }
    )


def same(rows: BatchedDataDict, other: BatchedDataDict) -> bool:
    names = ("input_ids", "response_mask", "policy_version", "rollout_logprobs")
    return all(rows[name].values.equal(other[name].values) for name in names)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_rows_in_flight_of_all_batches_are_generated_elsewhere_from_the_same_seeds(fault: signal.Signals):
    generations: set[int] = set()  # those that sent rows to rank 1

    def before(call: Call) -> None:
        if call.method != "advance" or call.called != (1,) or len(generations) == 2:
            return
        rows, _, generation, *_ = call.args_of_rank[0]
        generations.update([generation] if rows.num_rows else [])
        if len(generations) == 2:  # the engine does not get to the rows of this call
            engine: Any = ranks.workers[1]._engine
            os.kill(engine._started.processes[0].pid, fault)

    ranks, access = TurnedRanks(before), EngineAccess(are_concurrent=True)
    group, found, routers = WorkerGroup("rollout", ranks, Batching(max_tokens=64)), {}, {}
    try:
        batches = {number: batch_of(number) for number in (1, 2)}
        expected = {number: ranks.workers[0].generate(batch, PARAMS) for number, batch in batches.items()}

        def draw(number: int) -> None:
            routers[number] = Router(
                *(group, PARAMS),
                capacity=CAPACITY,
                access=access,
                replace_engines=lambda generation, none_is_left: False,
                turn=(number, 0),
                call_s=0.1,
            )
            rows = BatchedDataDict.concat(list(routers[number].run(batches[number])))
            found[number] = rows.select(np.argsort(rows.row_ids))

        for _ in range(5):  # on a busy machine, rank 0 may take all rows of a batch
            threads = [threading.Thread(target=draw, args=(number,), daemon=True) for number in batches]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
            if len(generations) == 2:
                break
            generations.clear()
        assert all(same(found[number], expected[number]) for number in batches)
        assert sum(router.repeated for router in routers.values()) > 0
        assert access.failed == {1}
        replace_failed_engines(group, access)
        assert access.pop_metrics() == {"rollout/engines_replaced": 1.0}
        assert same(ranks.workers[1].generate(batches[1], PARAMS), expected[1])
    finally:
        ranks.close()
