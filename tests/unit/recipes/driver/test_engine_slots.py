"""Generations that run at the same time share the engines: earlier turns first, and no more rows than there is room."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
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
from rlpack.recipes.driver.engine_load import EngineLoad
from rlpack.recipes.driver.engine_slots import EngineShare, EngineSlots, Turn, turn_of_batch, turn_of_evaluation
from rlpack.recipes.driver.rollout_stages import DrawnPrompts
from rlpack.recipes.driver.router import Router
from rlpack.rollout import in_flight
from rlpack.rollout.canary import canary_tolerance
from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.types import Generations, SamplingParams
from rlpack.testing.local_ranks import LocalRanks
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_tokenizer

DEADLINE_S = 30.0
SLOTS, SAMPLES, GROUPS = 8, 4, 12


class SlottedEngine:
    """Decodes one token of its first `SLOTS` rows in each pass, as vLLM does; a row's seed is its number.

    Attributes:
        ended: the pass in which each row ended, by its number.
        begun: the numbers of rows, in the order in which they came.
        most: the most rows that it had.
    """

    vocab_size, policy_version, is_alive = 999, 0, True

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths, self.passes, self.most = lengths, 0, 0
        self.left: dict[int, list[int]] = {}
        self.ended: dict[int, int] = {}
        self.begun: list[int] = []

    def begin(self, keys: Sequence[int], prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> None:
        for key, seed in zip(keys, seeds.tolist(), strict=True):
            self.left[key] = [self.lengths[seed], seed]
            self.begun.append(seed)
        self.most = max(self.most, len(self.left))

    def finished(self, timeout_s: float) -> list[FinishedRow]:
        if timeout_s == 0.0:
            return []
        self.passes += 1
        running = list(self.left)[:SLOTS]
        for key in running:
            self.left[key][0] -= 1
        ended = [key for key in running if not self.left[key][0]]
        for key in ended:
            self.ended[self.left.pop(key)[1]] = self.passes
        return [FinishedRow(key, 1, "") for key in ended]

    def to_generations(self, responses: Sequence[int], params: SamplingParams) -> Generations:
        tokens = Ragged.from_rows([torch.full((length,), 5) for length in responses], torch.int64)
        zeros = torch.zeros(tokens.values.shape[0])
        return Generations(
            tokens, tokens.with_values(zeros), tokens.with_values(zeros.int()), ["length"] * len(responses)
        )

    def abort(self, keys: Sequence[int] | None = None) -> None: ...


class TurnedRanks(LocalRanks):
    """Ranks that run one call at a time, whichever thread it comes from."""

    def __init__(self, builders: Sequence[Any]) -> None:
        super().__init__(builders)
        self.lock = threading.Lock()

    def submit(self, call: Call) -> Pending[list[Any]]:
        with self.lock:
            return super().submit(call)


class Batches:
    """Batches of `GROUPS` groups each, drawn at the same time by routers of their own."""

    def __init__(self, ranks: int, batches: int) -> None:
        random = np.random.default_rng(ranks)
        self.lengths = random.choice([4, 9, 60], size=batches * GROUPS * SAMPLES, p=[0.5, 0.4, 0.1]).tolist()
        self.engines = [SlottedEngine(self.lengths) for _ in range(ranks)]
        self.access = EngineAccess(are_concurrent=True)

        def worker(context: RankContext) -> RolloutWorker:
            engine: Any = self.engines[context.rank]
            return RolloutWorker(context, engine, tiny_tokenizer(), canary_tolerance=canary_tolerance(torch.float32))

        self.group = WorkerGroup("rollout", TurnedRanks([worker] * ranks), Batching(max_tokens=64))
        self.threads: list[threading.Thread] = []
        self.rows: defaultdict[int, list[int]] = defaultdict(list)

    def rows_of(self, batch: int) -> range:
        return range((batch - 1) * GROUPS * SAMPLES, batch * GROUPS * SAMPLES)

    def start(self, batch: int, turn: Turn | None = None) -> None:
        turn = turn_of_batch(batch) if turn is None else turn
        self.threads.append(threading.Thread(target=self._draw, args=(batch, turn), daemon=True))
        self.threads[-1].start()

    def _draw(self, batch: int, turn: Turn) -> None:
        numbers = self.rows_of(batch)
        columns = {
            "input_ids": Ragged.from_rows([torch.tensor([5, 6])] * len(numbers), torch.int64),
            "uid": [str(number) for number in numbers],
            "group_ids": torch.arange(GROUPS).repeat_interleave(SAMPLES),
            "seeds": torch.tensor(numbers),
        }
        router = Router(
            *(self.group, SamplingParams(max_new_tokens=60)),
            capacity=SLOTS,
            access=self.access,
            replace_engines=lambda generation, none_is_left: False,
            turn=turn,
            call_s=0.1,
        )
        for ended in router.run(BatchedDataDict(columns)):
            self.rows[batch] += map(int, ended["uid"])

    def end(self) -> None:
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert self.access.load.in_flight == dict.fromkeys(range(len(self.engines)), 0)

    def ended(self, batch: int) -> dict[int, tuple[int, int]]:
        """Return the engine of each row of a batch, and the pass in which it ended."""
        rows = self.rows_of(batch)
        ended = {row: (rank, at) for rank, engine in enumerate(self.engines) for row, at in engine.ended.items()}
        return {row: ended[row] for row in rows}


@pytest.fixture(autouse=True)
def answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "_COALESCE_S", 0.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_of_the_first_batch_ends_when_it_would_if_later_batches_were_not_drawn(ranks: int):
    alone, together = Batches(ranks, 3), Batches(ranks, 3)
    alone.start(1)
    alone.end()
    together.access.slots.expect(turn_of_batch(1))
    together.access.slots.expect(turn_of_batch(2))
    for batch in (3, 2, 1):  # in the order of their threads, that of batches would be reversed
        together.start(batch)
        time.sleep(0.05)
    together.end()
    assert all(sorted(together.rows[batch]) == list(together.rows_of(batch)) for batch in (1, 2, 3))
    assert together.ended(1) == alone.ended(1)
    last_pass = max(at for _, at in alone.ended(1).values())
    assert min(at for _, at in together.ended(2).values()) < last_pass, "places that the first batch leaves are empty"
    for engine in together.engines:
        assert engine.most <= SLOTS - 1 + SAMPLES
        batches = [1 + row // (GROUPS * SAMPLES) for row in engine.begun]
        assert batches == sorted(batches)


def test_an_evaluation_comes_after_the_batch_that_its_step_takes_first_and_before_later_ones():
    of_batch, of_evaluation = (
        DrawnPrompts(BatchedDataDict({}, row_ids=[]), step, np.arange(0), evaluated_during=during).turn
        for step, during in ((3, None), (2**32, 3))
    )
    assert of_batch == turn_of_batch(3) < of_evaluation == turn_of_evaluation(3) < turn_of_batch(4)


def slots(
    *turns: Turn, rows: int = 100, are_concurrent: bool = True
) -> tuple[EngineLoad, list[EngineShare], ExitStack]:
    load, stack = EngineLoad(), ExitStack()
    shared = EngineSlots(load, are_concurrent=are_concurrent)
    shares = [stack.enter_context(shared.share(turn, rows, range(2), 10)) for turn in turns]
    return load, shares, stack


def test_rows_that_an_earlier_batch_generates_again_get_the_next_room_of_an_engine():
    load, (first, second), _ = slots((1, 0), (2, 0), rows=8)
    assert first.take([0], 8, 80) == 0
    first.sent()
    assert second.take([0, 1], 4, 40) == 1
    assert second.take([1], 4, 40) == 1
    second.sent()
    second.queue(20)
    assert second.take([0], 4, 40) == 0
    second.sent()
    first.release(0, 2, 20)
    first.queue(2)  # they failed
    assert load.in_flight == {0: 10, 1: 8}
    assert second.take([0, 1], 4, 40) is None
    assert first.take([0], 2, 20) is None
    assert first.rows_to_room(0) == second.rows_to_room(0) == 1
    second.release(0, 1, 10)
    assert second.take([0], 1, 10) is None
    assert first.take([0, 1], 2, 20) == 1, "the engine with the fewest tokens of all generations together"


def test_a_later_generation_waits_until_the_rows_of_an_earlier_one_were_sent():
    _, (first, second), _ = slots((1, 0), (2, 0), rows=4)
    assert second.take([0, 1], 4, 40) is None
    assert first.take([0, 1], 4, 40) == 0
    assert second.take([0, 1], 4, 40) is None
    began = time.monotonic()
    threading.Timer(0.1, first.sent).start()
    second.wait(DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S / 2, "it was not told"
    assert second.take([0, 1], 4, 40) == 1


def test_a_generation_that_is_expected_and_never_comes_keeps_no_other_one_waiting():
    load = EngineLoad()
    shared = EngineSlots(load, are_concurrent=True)
    with shared.share((2, 0), 4, range(1), 10) as share:
        shared.expect((3, 0))
        shared.expect((1, 0))
        assert share.take([0], 1, 10) is None
        shared.expect_no_more((1, 0))
        assert share.take([0], 1, 10) == 0
    with shared.share((3, 0), 4, range(1), 10) as share, shared.share((4, 0), 4, range(1), 10) as other:
        assert other.take([0], 4, 10) is None
        assert share.take([0], 4, 10) == 0
        share.sent()
        assert other.take([0], 4, 10) == 0
    assert load.in_flight == {0: 0}


def test_what_was_given_up_counts_no_more():
    load, (first,), stack = slots((1, 0))
    assert first.take([0], 8, 80) == 0
    stack.close()
    assert load.in_flight == {0: 0, 1: 0}
    load, (_, second), _ = slots((1, 0), (1, 0), are_concurrent=False)
    assert second.take([0], 8, 80) == 0
    assert load.in_flight == {0: 8, 1: 0}
