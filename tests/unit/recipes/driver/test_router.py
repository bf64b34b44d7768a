"""The router sends whole groups to ranks, and again where an engine fails."""

import math
import pickle
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.distributed.calls import Call, Pending
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import RanksRestartedError, RoleError, RowError
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.recipes.driver import router as router_module
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.engine_restarts import replace_failed_engines
from rlpack.recipes.driver.router import MOST_REPEATS, Router
from rlpack.rollout import in_flight
from rlpack.rollout.canary import canary_tolerance
from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.types import Generations, SamplingParams
from rlpack.testing.local_ranks import LocalRanks
from rlpack.workers.build import build_model
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer
from tests.unit.rollout.streaming import StreamingHF

PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=(1,))


class Ranks:
    """Rollout ranks with streaming engines of the same weights."""

    def __init__(self, count: int) -> None:
        self.model = build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=3, attention_name="sdpa")
        self.engines: list[StreamingHF] = []
        self.workers: list[RolloutWorker] = []
        self.access = EngineAccess(are_concurrent=False)
        self.group = WorkerGroup("rollout", LocalRanks([self._worker] * count), Batching(max_tokens=64))

    def engine(self) -> StreamingHF:
        self.engines.append(StreamingHF(self.model))
        return self.engines[-1]

    def _worker(self, context: RankContext) -> RolloutWorker:
        tolerance = canary_tolerance(torch.float32)
        worker = RolloutWorker(
            context, self.engine(), tiny_tokenizer(), canary_tolerance=tolerance, rebuild=self.engine
        )
        self.workers.append(worker)
        return worker

    def replace(self, generation: int, none_is_left: bool) -> bool:
        replace_failed_engines(self.group, self.access)
        self.access.record_replacement(self.group.ranks.num_starts)
        return True

    def run(self, prompts: BatchedDataDict, capacity: int = 64, **given: Any) -> tuple[BatchedDataDict, Router]:
        router = Router(
            *(self.group, PARAMS),
            capacity=capacity,
            access=self.access,
            replace_engines=given.get("replace", self.replace),
        )
        parts = list(router.run(prompts))
        for part in parts:
            sizes = prompts["group_ids"].bincount()
            ids = part["group_ids"]
            assert (ids.bincount(minlength=sizes.numel())[ids] == sizes[ids]).all(), "whole groups"
        rows = BatchedDataDict.concat(parts)
        return rows.select(np.argsort(rows.row_ids)), router


def prompts(groups: int, samples: int = 4) -> BatchedDataDict:
    rows = tiny_rollouts([(1 + group % 7, 0) for group in range(groups)], group=1).keep(["input_ids", "uid"])
    rows = rows.repeat_interleave(samples)
    ids = torch.arange(groups).repeat_interleave(samples)
    return rows.union({"group_ids": ids, "seeds": torch.arange(groups * samples) + 17})


def expected(ranks: Ranks, batch: BatchedDataDict) -> BatchedDataDict:
    return ranks.workers[0].generate(batch, PARAMS)


def same(rows: BatchedDataDict, other: BatchedDataDict) -> bool:
    names = ("input_ids", "response_mask", "policy_version", "rollout_logprobs")
    lists = ("finish_reason", "completion", "uid")
    return all(rows[name].values.equal(other[name].values) for name in names) and all(
        rows[name] == other[name] for name in lists
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 5, 13])
def test_rows_are_those_of_a_single_call_whatever_the_engines_do(count: int, groups: int):
    ranks, batch = Ranks(count), prompts(groups)
    rows, router = ranks.run(batch)
    assert same(rows, expected(ranks, batch))
    assert router.repeated == 0


def test_an_engine_gets_a_group_as_soon_as_it_has_room_for_a_row_of_it():
    ranks = Ranks(2)
    ranks.run(prompts(12, samples=3), capacity=7)
    assert [engine.most for engine in ranks.engines] == [9, 9]
    ranks.run(prompts(2, samples=12), capacity=7)  # groups that are larger run by themselves
    assert [engine.most for engine in ranks.engines] == [12, 12]


class SlottedEngine:
    """Decodes one token of the first `slots` rows at a time; a row's length is its seed.

    Attributes:
        running: how many rows each pass decoded.
        waited: how many other rows the engine had meanwhile.
    """

    vocab_size, policy_version, is_alive = 999, 0, True

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows: dict[int, list[int]] = {}
        self.running: list[int] = []
        self.waited: list[int] = []

    def begin(self, keys: Sequence[int], prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> None:
        self.rows |= {key: [int(seed), int(seed)] for key, seed in zip(keys, seeds, strict=True)}

    def finished(self, timeout_s: float) -> list[FinishedRow]:
        if timeout_s == 0.0:
            return []
        decoded = list(self.rows)[: self.slots]
        self.running.append(len(decoded))
        self.waited.append(len(self.rows) - len(decoded))
        for key in decoded:
            self.rows[key][0] -= 1
        ended = [key for key in decoded if not self.rows[key][0]]
        return [FinishedRow(key, self.rows.pop(key)[1], "") for key in ended]

    def to_generations(self, responses: Sequence[int], params: SamplingParams) -> Generations:
        tokens = Ragged.from_rows([torch.full((length,), 5) for length in responses], torch.int64)
        zeros = torch.zeros(tokens.values.shape[0])
        return Generations(
            tokens, tokens.with_values(zeros), tokens.with_values(zeros.int()), ["length"] * len(responses)
        )

    def abort(self, keys: Sequence[int] | None = None) -> None: ...


SLOTS = 16


def slotted_ranks(engines: Sequence[SlottedEngine]) -> Ranks:
    def worker(context: RankContext) -> RolloutWorker:
        engine: Any = engines[context.rank]
        return RolloutWorker(context, engine, tiny_tokenizer(), canary_tolerance=canary_tolerance(torch.float32))

    ranks = Ranks(1)
    ranks.group = WorkerGroup("rollout", LocalRanks([worker] * len(engines)), Batching(max_tokens=64))
    return ranks


@pytest.mark.parametrize("count", [1, 2])
def test_engines_are_full_although_the_lengths_of_groups_are_skewed(count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_flight, "_COALESCE_S", 0.0)
    groups, samples, random = 40, 8, np.random.default_rng(0)
    lengths = torch.from_numpy(random.choice([10, 20, 128], size=groups * samples, p=[0.5, 0.4, 0.1]))
    batch = prompts(groups, samples).drop(["seeds"]).union({"seeds": lengths})
    engines = [SlottedEngine(SLOTS) for _ in range(count)]
    ranks = slotted_ranks(engines)
    rows, _ = ranks.run(batch, capacity=SLOTS)
    assert torch.equal(rows["response_lengths"], lengths)
    for engine in engines:
        # The last rows leave room: nothing waits any more.
        busy = [running for running, waited in zip(engine.running, engine.waited, strict=True) if waited]
        assert len(busy) > len(engine.running) / 2
        assert np.mean(busy) > 0.98 * SLOTS
        assert max(engine.waited) < samples, "the driver keeps rows back that other engines may answer earlier"


def test_the_work_per_row_does_not_grow_with_the_rows_that_wait_for_their_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_flight, "_COALESCE_S", 0.0)
    monkeypatch.setattr(router_module, "_PART_ROWS", 4)
    concat, joined = BatchedDataDict.concat, list[int]()

    def counted(batches: Sequence[BatchedDataDict]) -> BatchedDataDict:
        joined.append(sum(batch.num_rows for batch in batches))
        return concat(batches)

    samples, joined_per_row = 4, list[float]()
    for groups in (8, 32):
        lengths = torch.from_numpy(np.random.default_rng(0).permutation(groups * samples)) + 1
        batch = prompts(groups, samples).drop(["seeds"]).union({"seeds": lengths})
        ranks, size = slotted_ranks([SlottedEngine(batch.num_rows)]), batch.num_rows
        router = Router(ranks.group, PARAMS, capacity=size, access=ranks.access, replace_engines=ranks.replace)
        with monkeypatch.context() as patched:
            patched.setattr(BatchedDataDict, "concat", counted)
            parts = list(router.run(batch))
        assert sum(part.num_rows for part in parts) == size
        joined_per_row.append(sum(joined) / size)
        joined.clear()
    assert joined_per_row[1] < 1.5 * joined_per_row[0]


def test_groups_go_to_the_rank_with_the_fewest_tokens_in_flight():
    ranks = Ranks(2)
    rows = tiny_rollouts([(30, 0), (2, 0), (3, 0), (4, 0)], group=1).keep(["input_ids", "uid"])
    batch = rows.union({"group_ids": torch.arange(4), "seeds": torch.arange(4)})
    ranks.run(batch)
    assert [engine.lengths for engine in ranks.engines] == [[30], [2, 3, 4]]


def test_groups_of_a_dead_engine_are_generated_elsewhere_from_the_same_seeds():
    ranks, batch = Ranks(2), prompts(9)
    ranks.engines[1].fails = 1
    rows, router = ranks.run(batch)
    assert same(rows, expected(ranks, batch))
    assert 0 < router.repeated <= batch.num_rows - 3, "rows that had been answered were kept"
    assert len(ranks.engines) == 2, "no engine was replaced while another could answer"


def test_an_engine_that_failed_gets_no_rows_of_the_next_generation_before_it_is_replaced():
    ranks = Ranks(2)
    ranks.engines[1].fails = 1
    ranks.run(prompts(9))
    begun = len(ranks.engines[1].lengths)
    rows, router = ranks.run(prompts(9), replace=lambda generation, none_is_left: False)
    assert len(ranks.engines[1].lengths) == begun, "a failed engine got rows again"
    assert router.repeated == 0
    rows, router = ranks.run(prompts(9))  # replaced before it begins
    assert same(rows, expected(ranks, prompts(9)))
    assert len(ranks.engines) == 3
    assert len(ranks.engines[2].lengths) > 0


def test_the_last_engine_is_replaced_and_its_groups_generated_again():
    ranks, batch = Ranks(1), prompts(5)
    ranks.engines[0].fails = 1
    rows, _ = ranks.run(batch)
    assert same(rows, expected(ranks, batch))
    assert len(ranks.engines) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_with_a_late_response_completes_its_others_before_it_is_replaced(count: int):
    ranks, batch = Ranks(count), prompts(8)
    ranks.engines[0].late = 1
    rows, router = ranks.run(batch)
    assert same(rows, expected(ranks, batch))
    assert router.repeated == 1
    assert len(ranks.engines) == 2, "with another engine, it is replaced later"


def test_a_group_that_fails_every_time_ends_the_run_with_its_prompt_and_the_reason():
    ranks = Ranks(1)

    def replace(generation: int, none_is_left: bool) -> bool:
        ranks.replace(generation, none_is_left)
        ranks.engines[-1].fails = 1
        return True

    ranks.engines[0].fails = 1
    text = r"row \d of prompt \S+ failed 4 times, the last time with: the engine (died|is dead)"
    with pytest.raises(RoleError, match=text) as raised:
        ranks.run(prompts(1), replace=replace)
    assert (raised.value.role, raised.value.rank) == ("rollout", 0)
    assert len(ranks.engines) == 4


def test_a_group_is_generated_again_three_times():
    ranks, batch = Ranks(1), prompts(1)
    ranks.engines[0].spoils = MOST_REPEATS * batch.num_rows
    rows, router = ranks.run(batch)
    assert same(rows, expected(ranks, batch))
    assert router.repeated == 3 * batch.num_rows


@pytest.mark.parametrize("count", [1, 2])
def test_a_response_that_cannot_be_used_is_generated_again_elsewhere_and_its_engine_goes_on(
    count: int, caplog: pytest.LogCaptureFixture
):
    ranks, batch = Ranks(count), prompts(9)
    ranks.engines[0].spoils = 2
    rows, router = ranks.run(batch)
    assert same(rows, expected(ranks, batch))
    assert router.repeated == 2
    assert len(ranks.engines) == count
    assert not ranks.access.failed
    assert re.search(
        r"role rollout, rank 0: generating 2 rows again from their seeds, the first one row \d+ of prompt \S+: "
        r"its response of policy version 0 can't be used: log-prob nan in segment 1 \(policy\); it has to be finite",
        caplog.text,
    )
    begun = [len(engine.lengths) for engine in ranks.engines]
    assert sum(begun) == batch.num_rows + 2
    assert begun[0] % 4 == (2 if count == 1 else 0), "the rows went to the other engine"


def test_a_row_that_waits_for_a_full_engine_keeps_no_other_rows_waiting(monkeypatch: pytest.MonkeyPatch):
    ranks, batch = Ranks(2), prompts(8)
    first, second = ranks.engines
    first.spoils, end = 1, time.monotonic() + 30.0
    answer, before = second.finished, list[int]()

    def held(timeout_s: float) -> list[FinishedRow]:
        """Answer once the first engine has got all other groups."""
        if len(first.lengths) < 7 * 4 and time.monotonic() < end:
            time.sleep(0.01)
            return []
        before.append(len(first.lengths))
        return answer(timeout_s)

    monkeypatch.setattr(second, "finished", held)
    rows, router = ranks.run(batch, capacity=4)
    assert same(rows, expected(ranks, batch))
    assert before[0] == 7 * 4
    assert router.repeated == 1
    assert len(second.lengths) == 4 + 1


def test_a_response_that_can_never_be_used_ends_the_run_with_its_row_rank_and_version():
    ranks = Ranks(1)
    ranks.engines[0].spoils = 10**6
    text = (
        r"role rollout, rank 0, in advance: row \d of prompt \S+ failed 4 times, .* of policy version 0 can't be used"
    )
    batch = prompts(2)
    with pytest.raises(RowError, match=text) as raised:
        ranks.run(batch)
    failure, uid_of = raised.value.failure, dict(zip(batch.row_ids.tolist(), batch["uid"], strict=True))
    assert (raised.value.role, raised.value.rank, failure.num_attempts, failure.policy_version) == ("rollout", 0, 4, 0)
    assert failure.uid == uid_of[failure.row]
    assert failure.reason in str(pickle.loads(pickle.dumps(raised.value)))
    assert len(ranks.engines) == 1


def test_rows_that_a_replaced_engine_had_in_flight_are_counted_and_limited():
    ranks, batch = Ranks(1), prompts(4)
    router = Router(ranks.group, PARAMS, capacity=64, access=ranks.access, replace_engines=ranks.replace)
    parts = router.run(batch)
    first = next(parts)  # 4 rows of 16 or a few more have ended
    ranks.workers[0]._is_unhealthy = True  # as after a failed canary
    ranks.replace(0, True)
    rows = BatchedDataDict.concat([first, *parts])
    assert same(rows.select(np.argsort(rows.row_ids)), expected(ranks, batch))
    assert 0 < router.repeated < batch.num_rows
    assert not ranks.access.failed, "the new engine is not the one that failed"


def test_rows_that_a_replaced_engine_had_in_flight_may_go_to_its_successor():
    ranks, batch = Ranks(2), prompts(12)
    router = Router(ranks.group, PARAMS, capacity=64, access=ranks.access, replace_engines=ranks.replace)
    parts = router.run(batch)
    first = next(parts)
    assert vars(ranks.engines[0])["rows"]
    ranks.workers[0]._is_unhealthy = True  # as after a failed canary
    ranks.replace(0, False)
    rows = BatchedDataDict.concat([first, *parts])
    assert same(rows.select(np.argsort(rows.row_ids)), expected(ranks, batch))
    assert len(ranks.engines[2].lengths) > 0


class HangingRanks(LocalRanks):
    """Ranks of which one never answers a call; it is started again once its result is waited for."""

    num_starts = 1  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, ranks: Ranks, hanging: int) -> None:
        super().__init__([ranks._worker] * 2)
        self.ranks, self.hanging, self.lost_at = ranks, hanging, math.inf
        self.unanswered: list[Pending[Any]] = []

    def submit(self, call: Call) -> Pending[Any]:
        if call.of_start not in (None, self.num_starts):
            raise RanksRestartedError(RoleError("rollout", 0, "advance", "the process died"))
        if self.num_starts > 1 or call.method != "advance" or call.called != (self.hanging,):
            return super().submit(call)
        assert call.answer_s is not None

        def lost() -> Any:
            self.num_starts, self.lost_at = 2, time.monotonic()
            self._workers = [self.ranks._worker(RankContext()) for _ in self._workers]
            raise RanksRestartedError(RoleError("rollout", self.hanging, "advance", "no answer"))

        # A group's own `Pending` has the answers of this one.
        self.unanswered.append(Pending(lost, [self.hanging]))
        return self.unanswered[-1]

    def wait_any(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[int]:
        answered = [place for place, one in enumerate(pending) if one.answers != (self.hanging,)]
        if not answered:
            time.sleep(timeout_s)
        return answered


def test_a_rank_that_hangs_is_waited_for_until_the_deadline_of_its_call_whatever_others_do(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(router_module, "_SLACK_S", 0.5)
    ranks, batch = Ranks(2), prompts(6)
    ranks.group = WorkerGroup("rollout", HangingRanks(ranks, 1), Batching(max_tokens=64))
    began = time.monotonic()
    rows, router = ranks.run(batch, capacity=4)
    local: Any = ranks.group.ranks
    assert 1.5 <= local.lost_at - began < 3.5  # call_s is 1
    assert same(rows, expected(ranks, batch))
    assert router.repeated > 0


def test_what_an_abandoned_generation_left_is_forgotten():
    ranks, batch = Ranks(2), prompts(9)
    router = Router(ranks.group, PARAMS, capacity=64, access=ranks.access, replace_engines=ranks.replace)
    next(iter(router.run(batch)))  # the step failed here
    other = prompts(4)
    rows, _ = ranks.run(other)
    assert same(rows, expected(ranks, other))


class RestartingRanks(LocalRanks):
    """Ranks of which the processes are started again before a call of some number."""

    num_starts = 1  # pyright: ignore[reportAssignmentType]

    def __init__(self, ranks: Ranks, count: int, restart_before: int) -> None:
        super().__init__([ranks._worker] * count)
        self.ranks, self.left = ranks, restart_before

    def submit(self, call: Call) -> Pending[Any]:
        if call.of_start not in (None, self.num_starts):
            raise RanksRestartedError(RoleError("rollout", 0, "advance", "the process died"))
        self.left -= call.method == "advance"
        if self.left == 0:
            self.left, self.num_starts = -1, self.num_starts + 1
            self._workers = [self.ranks._worker(RankContext()) for _ in self._workers]

            def lost() -> Any:
                raise RanksRestartedError(RoleError("rollout", 0, "advance", "the process died"))

            return Pending(lost)
        return super().submit(call)


@pytest.mark.parametrize("restart_before", [1, 2, 3, 4])
def test_rows_in_flight_are_sampled_again_on_ranks_that_were_started_again(restart_before: int):
    expected, _ = Ranks(2).run(prompts(6), capacity=8)
    ranks, replaced = Ranks(2), []
    ranks.group = WorkerGroup("rollout", RestartingRanks(ranks, 2, restart_before), Batching(max_tokens=64))

    def replace(generation: int, none_is_left: bool) -> bool:
        replaced.append(generation)
        ranks.access.record_replacement(ranks.group.ranks.num_starts)
        return True

    rows, router = ranks.run(prompts(6), capacity=8, replace=replace)
    assert len(replaced) == 1  # the engines got weights before any row was sampled again
    assert router.repeated > 0
    assert same(rows, expected)


def test_rows_that_were_not_sent_before_a_restart_cost_no_attempt():
    ranks = Ranks(2)
    ranks.group = WorkerGroup("rollout", RestartingRanks(ranks, 2, 1), Batching(max_tokens=64))
    rows, router = ranks.run(prompts(2), capacity=4)
    assert same(rows, expected(ranks, prompts(2)))
    assert router.repeated == 4  # of the rank whose call was lost; the other rank got none before


def test_a_publication_that_meets_a_restart_costs_no_row_an_attempt():
    ranks = Ranks(2)
    ranks.group = WorkerGroup("rollout", RestartingRanks(ranks, 2, 2), Batching(max_tokens=64))
    published: list[int] = []

    def replace(generation: int, none_is_left: bool) -> bool:
        published.append(generation)
        if len(published) == 1:  # it dies meanwhile, is sent again to new ranks, and succeeds
            ranks.group.ranks.num_starts += 1
            ranks.group.ranks._workers = [ranks._worker(RankContext()) for _ in range(2)]
        ranks.access.record_replacement(ranks.group.ranks.num_starts)
        return True

    rows, router = ranks.run(prompts(2), capacity=8, replace=replace)
    assert rows.num_rows == 8
    assert router.repeated == 4  # the rows of one rank, once each, by the restart of the ranks themselves
    assert len(published) == 1
