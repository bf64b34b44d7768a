"""The router sends whole groups to ranks, and again where an engine fails."""

from typing import Any

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.distributed.calls import Call, Pending
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import RanksRestartedError, RoleError
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.router import MOST_ATTEMPTS, Router
from rlpack.rollout.canary import canary_tolerance
from rlpack.rollout.types import SamplingParams
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
        self.group.run(RolloutWorker.replace_failed_engine)
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
    names = ("input_ids", "response_mask", "policy_version")
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


def test_no_engine_has_more_rows_in_flight_than_it_runs_at_once():
    ranks = Ranks(2)
    ranks.run(prompts(12, samples=3), capacity=7)
    assert [engine.most for engine in ranks.engines] == [6, 6]
    ranks.run(prompts(2, samples=9), capacity=7)  # a group that is larger runs by itself
    assert max(engine.most for engine in ranks.engines) == 9


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
    assert 0 < router.repeated <= batch.num_rows
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


def test_a_group_that_fails_every_time_ends_the_run_with_its_prompt_and_the_reason():
    ranks = Ranks(1)

    def replace(generation: int, none_is_left: bool) -> bool:
        ranks.replace(generation, none_is_left)
        ranks.engines[-1].fails = 1
        return True

    ranks.engines[0].fails = 1
    with pytest.raises(RoleError, match=rf"prompt \S+ failed {MOST_ATTEMPTS} times .* the engine died") as raised:
        ranks.run(prompts(1), replace=replace)
    assert (raised.value.role, raised.value.rank) == ("rollout", 0)
    assert len(ranks.engines) == MOST_ATTEMPTS


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
    assert torch.equal(rows["input_ids"].values, expected["input_ids"].values)
    torch.testing.assert_close(rows["rollout_logprobs"].values, expected["rollout_logprobs"].values)  # other batches
