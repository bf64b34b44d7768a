"""The driver's half of a call, over ranks that are objects in this process."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import MissingColumnError
from rlpack.distributed.calls import Call, Pending, Relay
from rlpack.distributed.context import RankContext
from rlpack.distributed.dispatch import broadcast, rank_zero, sharded
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching, Cost, PackingError
from rlpack.testing import local_ranks as role_ranks
from rlpack.worker import Worker
from tests.builders import tiny_rollouts

SIZES = [(3, 9), (5, 1), (4, 0), (2, 16), (7, 6), (3, 8), (1, 4)]


class Doubler(Worker):
    @sharded()
    def double(self, shard: BatchedDataDict, *, offset: int = 0) -> BatchedDataDict:
        rows = [row for step in range(shard.num_steps) for view in shard.microbatches(step) for row in view.index]
        back = shard.select(rows)
        tokens = back["input_ids"]
        return back.keep([]).union({"doubled": tokens.with_values(2 * tokens.values + offset)})

    @sharded(mini_batches=True, merge=list)
    def steps(self, shard: BatchedDataDict) -> int:
        return shard.num_steps

    @sharded(merge=list, needs_whole_groups=lambda together: together)
    def groups_of_microbatches(self, shard: BatchedDataDict, together: bool) -> list[set[int]]:
        return [set(view.rows["group_ids"].tolist()) for view in shard.microbatches(0)]

    @broadcast
    def rank(self) -> int:
        return self.context.rank

    @rank_zero
    def alone(self) -> int:
        return self.context.num_ranks


class Named(Worker):
    @sharded(reads="given", returns="rewards")
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard.rename({"given": "rewards"})

    @sharded(reads=lambda: "given", optional="uid", merge=list)
    def columns(self, shard: BatchedDataDict) -> list[str]:
        return sorted(shard)


def logged(method: Any) -> Any:
    def rank(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return rank


class Logged(Doubler):
    """A method that its decorator has given the name of another."""

    @broadcast
    @logged
    def level(self) -> int:
        return 7


class Renamed(Doubler):
    @broadcast
    def rank(self) -> int:
        return 8

    number = rank


class Keywords(Worker):
    @broadcast
    def joined(self, *, method: str, args: str = "") -> str:
        return method + args


class LocalRanks:
    """Ranks that run one after the other here; arguments and results are pickled as on their way elsewhere."""

    def __init__(self, size: int, role: type[Worker] = Doubler) -> None:
        self.workers = [role(RankContext("main", rank, ParallelLayout(dp_shard=size))) for rank in range(size)]
        self.called: list[int] = []

    @property
    def num_ranks(self) -> int:
        return len(self.workers)

    def submit(self, call: Call) -> Pending[list[Any]]:
        self.called.append(len(call.args_of_rank))
        pickled = [
            pickle.dumps(getattr(worker, call.method)(*pickle.loads(pickle.dumps(args)), **call.kwargs))
            for worker, args in zip(self.workers, call.args_of_rank, strict=False)
        ]
        return Pending(lambda: [pickle.loads(pickled[rank]) for rank in call.outputs])

    def after_restart(self, key: Any, function: Callable[[], None]) -> None:
        function()

    def relay(self, relays: Sequence[Relay], target: Any, kept: list[Any] | None = None) -> list[Any]:
        raise NotImplementedError

    def load_again(self, values: Sequence[Any], relays: Sequence[Relay]) -> list[Any]:
        raise NotImplementedError


def group(batching: Batching, size: int = 2, mini_batch_size: int | None = None) -> WorkerGroup[Doubler]:
    return WorkerGroup("doubler", LocalRanks(size), batching, mini_batch_size)


BATCHINGS = [
    Batching(max_tokens=24),
    Batching(mode="dynamic", max_tokens=48),
    Batching(mode="fixed", micro_batch_size=2),
]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_order_is_restored_for_any_batching_and_number_of_ranks(batching: Batching, size: int, rows: int):
    batch = tiny_rollouts(SIZES[:rows])
    before = copy.copy(batch)
    found = group(batching, size).run(Doubler.double, batch, offset=1)
    assert torch.equal(found["doubled"].values, 2 * batch["input_ids"].values + 1)
    assert found["doubled"].lengths.tolist() == batch["input_ids"].lengths.tolist()
    assert list(batch) == list(before)
    assert batch.plan is None


def test_a_keyword_may_have_the_name_of_a_parameter_of_run():
    keywords: WorkerGroup[Keywords] = WorkerGroup("keywords", LocalRanks(1, Keywords), Batching(), role_class=Keywords)
    assert keywords.run(Keywords.joined, method="exact", args="ly") == "exactly"
    assert keywords.run_at_every_start(Keywords.joined, method="exact") == "exact"
    assert keywords.submit(Keywords.joined, method="exact").result() == "exact"


def test_a_method_that_lost_its_name_is_never_mistaken_for_another():
    ranks = LocalRanks(1, Logged)
    logged_group: WorkerGroup[Logged] = WorkerGroup("logged", ranks, Batching(), role_class=Logged)
    with pytest.raises(TypeError, match=r"Logged: its method level is named 'rank'.*functools\.wraps\(method\)"):
        logged_group.run(Logged.level)
    assert logged_group.run(Doubler.rank) == 0
    assert ranks.called == [1]


def test_a_method_may_have_two_names_and_be_overridden():
    ranks = LocalRanks(1, Renamed)
    renamed: WorkerGroup[Renamed] = WorkerGroup("renamed", ranks, Batching(), role_class=Renamed)
    assert [renamed.run(method) for method in (Renamed.number, Renamed.rank, Doubler.rank)] == [8, 8, 8]


def test_truncated_and_dropped_rows_come_back_with_zeros():
    batch = tiny_rollouts([(3, 9), (2, 4), (5, 20)])
    kept = group(Batching(max_tokens=16, overlong="drop")).run(Doubler.double, batch)["doubled"].rows()
    assert [row.numel() for row in kept] == [12, 6, 25]
    assert kept[2].eq(0).all()
    cut = group(Batching(max_tokens=16, overlong="truncate")).run(Doubler.double, batch)["doubled"].rows()
    assert cut[2][16:].eq(0).all()
    assert torch.equal(cut[2][:16], 2 * batch["input_ids"].rows()[2][:16])


def test_a_row_over_the_budget_is_refused_before_any_rank_is_called():
    doublers = group(Batching(max_tokens=16))
    with pytest.raises(PackingError, match="25 tokens"):
        doublers.run(Doubler.double, tiny_rollouts([(5, 20)]))
    assert doublers.ranks.called == []


def test_mini_batches_are_planned_for_methods_that_ask_for_them():
    batch = tiny_rollouts(SIZES)
    doublers = group(Batching(max_tokens=24), mini_batch_size=3)
    assert doublers.run(Doubler.steps, batch) == [3, 3]
    assert doublers.plan(batch).num_steps == 1
    assert doublers.plan(batch, mini_batches=True).step_of_row.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_a_call_with_a_plan_takes_its_steps_and_leaves_later_calls_alone():
    batch, other = tiny_rollouts(SIZES), tiny_rollouts(SIZES[::-1])
    doublers = group(Batching(max_tokens=24), mini_batch_size=3)
    assert doublers.with_plan(doublers.plan(batch)).run(Doubler.steps, batch) == [1, 1]
    assert doublers.run(Doubler.steps, batch) == [3, 3]
    with pytest.raises(PackingError, match="a call of doubler was given the plan of a batch with other lengths"):
        doublers.with_plan(doublers.plan(batch)).run(Doubler.steps, other)


@pytest.mark.parametrize(("planned", "called"), [(4, 2), (4, 1), (1, 2)])
def test_a_plan_for_another_number_of_data_ranks_is_refused_before_any_rank_is_called(planned: int, called: int):
    batch = tiny_rollouts(SIZES)
    plan = group(Batching(max_tokens=24), planned).plan(batch)
    doublers = group(Batching(max_tokens=24), called).with_plan(plan)
    message = (
        rf"doubler was given a plan for another number of data ranks \({planned} instead of {called}\); make it with"
    )
    for method in (Doubler.steps, Doubler.double):
        with pytest.raises(PackingError, match=message):
            doublers.run(method, batch)
    assert doublers.ranks.called == []


def test_a_call_that_needs_whole_groups_gets_each_of_them_in_one_microbatch():
    batch, doublers = tiny_rollouts(SIZES), group(Batching(max_tokens=24))

    def times_seen(together: bool) -> list[int]:
        ranks = doublers.run(Doubler.groups_of_microbatches, batch, together)
        labels = batch["group_ids"].unique().tolist()
        return [sum(label in groups for microbatches in ranks for groups in microbatches) for label in labels]

    assert times_seen(True) == [1, 1, 1, 1]
    assert max(times_seen(False)) == 2
    planned = doublers.with_plan(doublers.plan(batch, whole_groups=True))
    assert len(planned.run(Doubler.groups_of_microbatches, batch, True)) == 2
    with pytest.raises(PackingError, match="plan with whole_groups=True"):
        doublers.with_plan(doublers.plan(batch)).run(Doubler.groups_of_microbatches, batch, True)


@pytest.mark.parametrize("nest", [lambda batch: [batch], lambda batch: (1, batch), lambda batch: {"rows": batch}])
def test_a_batch_inside_another_argument_is_refused_before_the_call(nest: Callable[[Any], Any]):
    doublers = group(Batching(max_tokens=24))
    batch = tiny_rollouts(SIZES)
    with pytest.raises(TypeError, match=r"Doubler\.double was given a (list|tuple|dict) with a batch, .* separate arg"):
        doublers.run(Doubler.double, batch, nest(batch))
    assert doublers.ranks.called == []


@pytest.mark.parametrize(
    ("args", "kwargs", "given"),
    [((), {"shard": tiny_rollouts(SIZES)}, "none"), ((), {}, "none"), ((dict(tiny_rollouts(SIZES)),), {}, "a dict")],
)
def test_a_sharded_call_without_a_batch_in_first_place_says_how_to_pass_it(args: Any, kwargs: Any, given: str):
    doublers = group(Batching(max_tokens=24))
    message = (
        rf"Doubler\.double is sharded: .* a BatchedDataDict, and {given} was given; pass the batch by position, run\("
    )
    with pytest.raises(TypeError, match=message):
        doublers.run(Doubler.double, *args, **kwargs)
    assert doublers.ranks.called == []


def test_a_column_declared_by_its_name_alone_is_one_column():
    batch = tiny_rollouts(SIZES).union({"given": torch.arange(7.0)})
    group = WorkerGroup("named", LocalRanks(2, Named), Batching(), role_class=Named)
    assert group.run(Named.score, batch)["rewards"].tolist() == [float(row) for row in range(7)]
    assert group.run(Named.columns, batch) == [["given", "uid"]] * 2
    with pytest.raises(MissingColumnError, match=r"named\.score reads the column 'given'"):
        group.run(Named.score, batch.drop(["given"]))


def test_broadcast_calls_all_ranks_and_rank_zero_one():
    doublers = group(Batching(), size=3)
    assert (doublers.run(Doubler.rank), doublers.run(Doubler.alone)) == (0, 3)
    assert doublers.ranks.called == [3, 1]


class Everywhere(Doubler):
    @broadcast
    def alone(self) -> int:
        return self.context.num_ranks


def test_an_override_is_called_as_its_own_decorator_says():
    doublers = WorkerGroup("doubler", LocalRanks(3), Batching(), role_class=Everywhere)
    assert doublers.run(Doubler.alone) == 3
    assert doublers.ranks.called == [3]


def test_rows_without_tokens_weigh_the_same():
    texts = BatchedDataDict({"completion": ["a"] * 7})
    assert [len(plan.rows) for plan in map(group(Batching()).plan(texts).rank_plan, range(2))] == [4, 3]


def test_a_plan_is_a_function_of_lengths_and_mini_batches():
    doubler = group(Batching(max_tokens=64), mini_batch_size=2)
    batch = tiny_rollouts(SIZES)
    plans = [doubler.plan(rows) for rows in (batch, batch.keep(["input_ids"]))]
    assert plans[0].order.tolist() == plans[1].order.tolist()
    assert (plans[0].num_steps, doubler.plan(batch, mini_batches=True).num_steps) == (1, 4)


def test_ranks_are_balanced_by_what_sequences_cost_the_model():
    batch = tiny_rollouts([(5, 3), (2, 0), (2, 0), (2, 0), (2, 0)])
    quadratic = WorkerGroup("doubler", LocalRanks(2), Batching(max_tokens=64), cost=Cost(0.0, 1.0))
    assert sorted(group(Batching(max_tokens=64)).plan(batch).padded_lengths.ravel().tolist()) == [8, 8]
    assert quadratic.plan(batch).counts.ravel().tolist() in ([1, 4], [4, 1])


def test_rollouts_of_a_prompt_share_it_if_their_role_shares_prompts():
    rollouts = tiny_rollouts([(5, 3), (5, 2), (4, 6), (4, 1)], group=2)
    plan = group(Batching(max_tokens=64, share_prompts=True)).plan(rollouts)
    assert plan.request.prompts is not None
    assert plan.request.prompts.tolist() == [0, 0, 1, 1]
    assert plan.metrics.shared_tokens == sum(plan.shared.tolist()) > 0
    assert group(Batching(max_tokens=64)).plan(rollouts).metrics.shared_tokens == 0
    without = rollouts.drop(["prompt_lengths"])
    assert group(Batching(max_tokens=64, share_prompts=True)).plan(without).metrics.shared_tokens == 0


def test_a_plan_that_may_split_groups_to_share_prompts_is_refused_by_a_call_that_needs_them_whole():
    rollouts = tiny_rollouts([(5, 3), (5, 2), (5, 6), (5, 1)], group=4)
    sharing = group(Batching(max_tokens=64, share_prompts=True))
    with pytest.raises(PackingError, match="needs microbatches of whole groups"):
        sharing.with_plan(sharing.plan(rollouts)).run(Doubler.groups_of_microbatches, rollouts, True)


def test_rows_without_tokens_share_no_prompts():
    rollouts = tiny_rollouts([(5, 3), (5, 2)], group=2).drop(["input_ids"])
    plan = group(Batching(max_tokens=64, share_prompts=True)).plan(rollouts)
    assert plan.lengths.tolist() == [1, 1]
    assert plan.metrics.shared_tokens == 0


def test_every_kind_of_call_can_be_submitted_and_waited_for_later():
    batch, doublers = tiny_rollouts(SIZES), group(Batching(max_tokens=24), mini_batch_size=3)
    rows = doublers.submit(Doubler.double, batch)
    steps = doublers.submit(Doubler.steps, batch)
    rank, alone = doublers.submit(Doubler.rank), doublers.submit(Doubler.alone)
    assert doublers.ranks.called == [2, 2, 2, 1]
    assert (alone.result(), rank.result(), steps.result()) == (2, 0, [3, 3])
    assert torch.equal(rows.result()["doubled"].values, 2 * batch["input_ids"].values)


class Scorer(Worker):
    @sharded(returns="rewards", background=True)
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard.keep([]).union({"rewards": shard["input_ids"].lengths.float()})

    @sharded(returns="rewards")
    def score_together(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self.score(shard)


class RecordingRanks(role_ranks.LocalRanks):
    """Keeps the calls."""

    def __init__(self, size: int, layout: ParallelLayout | None = None) -> None:
        super().__init__([Scorer] * size, layout=layout)
        self.calls: list[Call] = []

    def submit(self, call: Call) -> Pending[list[Any]]:
        self.calls.append(call)
        pending = super().submit(call)
        return Pending(pending.result, call.called)


def test_a_background_call_goes_only_to_ranks_that_have_rows():
    layout = ParallelLayout(dp_shard=4, tp=2)
    ranks = RecordingRanks(8, layout)
    scorers = WorkerGroup("scorer", ranks, Batching(), role_class=Scorer, layout=layout)
    batch = tiny_rollouts(SIZES)
    for rows, called in (([1, 4], 2), ([5], 1), ([], 1), (range(7), 4)):
        part = batch.select(list(rows))
        scored = scorers.run(Scorer.score, part)
        assert scored["rewards"].tolist() == part["input_ids"].lengths.tolist()
        assert scored.row_ids.tolist() == part.row_ids.tolist()
        call = ranks.calls[-1]
        assert len(call.args_of_rank) == len(call.called) == 2 * called
        assert {layout.dp_rank_of(rank) for rank in call.called} == {layout.dp_rank_of(rank) for rank in call.outputs}
    scorers.run(Scorer.score_together, batch.select([1]))  # may be a collective
    assert ranks.calls[-1].called == tuple(range(8))


def test_background_calls_with_few_rows_go_to_all_data_ranks_in_turn():
    layout = ParallelLayout(dp_shard=5, tp=2)
    ranks = RecordingRanks(10, layout)
    scorers = WorkerGroup("scorer", ranks, Batching(), role_class=Scorer, layout=layout)
    batch = tiny_rollouts(SIZES)
    pairs = [batch.select([first, first + 1]) for first in range(5)]
    pending = [scorers.submit(Scorer.score, pair) for pair in pairs]
    called = [layout.dp_rank_of(rank) for call in ranks.calls for rank in call.outputs]
    assert sorted(called) == sorted(2 * list(range(5)))
    for pair, scored in zip(pairs, pending, strict=True):
        assert scored.result().row_ids.tolist() == pair.row_ids.tolist()
        assert scored.result()["rewards"].tolist() == pair["input_ids"].lengths.tolist()


def test_a_background_call_on_rows_that_the_plan_drops_goes_to_one_rank():
    ranks = RecordingRanks(2)
    scorers = WorkerGroup("scorer", ranks, Batching(max_tokens=8, overlong="drop"), role_class=Scorer)
    assert scorers.run(Scorer.score, tiny_rollouts([(3, 9), (2, 16)])).num_rows == 2
    assert [call.called for call in ranks.calls] == [(0,)]


def test_only_a_call_that_runs_in_the_foreground_can_be_seen_to_end():
    scorers = WorkerGroup("scorer", RecordingRanks(2), Batching(), role_class=Scorer)
    assert scorers.submit(Scorer.score_together, tiny_rollouts(SIZES)).answers == (0, 1)
    assert scorers.submit(Scorer.score, tiny_rollouts(SIZES)).answers == ()
