"""What a role returns wrongly is one error of that role: which rank, in which method, and what to return instead."""

import copy
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.distributed.errors import RoleError
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.results import COUNTERS, check_scores, restored
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching, make_plan
from rlpack.rewards.reward_result import FAILURES
from rlpack.testing.local_ranks import LocalRanks
from rlpack.worker import Worker, sharded
from tests.builders import tiny_rollouts

SIZES = [(3, 9), (5, 1), (4, 0), (2, 16), (7, 6)]
CALL = ("judge", "score")
TWO_DATA_RANKS = ParallelLayout(dp_shard=2)


def refuse(results: list[Any]) -> int:
    raise KeyError("loss")


class Counter(Worker):
    @sharded(merge=refuse)
    def count(self, shard: BatchedDataDict) -> int:
        return shard.num_rows


class Repeats(Worker):
    """Returns as many rows as it was given, of which some are the same row."""

    @sharded()
    def select(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._scored(shard).select([0] * shard.num_rows)

    @sharded()
    def concat(self, shard: BatchedDataDict) -> BatchedDataDict:
        best = self._scored(shard).select([0])
        return BatchedDataDict.concat([best] * shard.num_rows)

    @sharded()
    def interleave(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._scored(shard).select([0]).repeat_interleave(shard.num_rows)

    @sharded()
    def select_then_more(self, shard: BatchedDataDict) -> BatchedDataDict:
        repeated = self._scored(shard).select([0] * shard.num_rows)
        return copy.deepcopy(repeated.union({"more": torch.ones(shard.num_rows)}).select(range(shard.num_rows)))

    @sharded()
    def reorder(self, shard: BatchedDataDict) -> BatchedDataDict:
        parts = self._scored(shard).select(range(shard.num_rows)[::-1]).split([1, shard.num_rows - 1])
        return copy.deepcopy(BatchedDataDict.concat(parts))

    def _scored(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard.keep([]).union({"rewards": shard["given"] * 10})


def restore(*, ranks: int = 2, **changes: Any) -> BatchedDataDict:
    """Restore what rank 1 changed (`rows`, `columns`) of what it had to return."""
    batch = tiny_rollouts(SIZES).keep(["input_ids"])
    group = WorkerGroup("judge", LocalRanks([Worker] * ranks), Batching(mode="fixed", micro_batch_size=2))
    plan = group.plan(batch)
    shards = batch.shard(plan)
    results = [shard.keep([]).union({"rewards": torch.ones(shard.num_rows)}) for shard in shards]
    last = results[-1]
    rows, columns = changes.get("rows", lambda given: given), changes.get("columns", lambda given: given)
    ids = rows(last.row_ids)
    results[-1] = BatchedDataDict(columns({"rewards": torch.ones(len(ids))}), row_ids=ids)
    return restored(batch, shards, results, plan=plan, call=CALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": lambda ids: ids[:-1]}, r"it returned \d rows for a shard of \d, without id \d; return every row"),
        ({"rows": lambda ids: ids + 100}, r"it returned a row with id 10\d, which its shard does not have; return ev"),
        (
            {"columns": lambda found: found | {"more": torch.ones(2)}},
            "it returned the columns more, rewards, but rank 0 returned rewards; return the same ones on every rank",
        ),
        (
            {"columns": lambda found: {"rewards": torch.ones(2), "uid": ["a", "b"]}},
            "it returned the columns rewards, uid, but rank 0 returned rewards",
        ),
    ],
)
def test_a_rank_that_returns_other_rows_or_columns_is_named(change: dict[str, Any], message: str):
    with pytest.raises(RoleError, match=rf"role judge, rank 1, in score: {message}"):
        restore(**change)
    assert restore()["rewards"].tolist() == [1.0] * 5


@pytest.mark.parametrize("method", [Repeats.select, Repeats.concat, Repeats.interleave, Repeats.select_then_more])
@pytest.mark.parametrize("ranks", [1, 2])
def test_repeated_rows_are_not_taken_for_the_rows_of_the_shard(method: Any, ranks: int):
    group = WorkerGroup("judge", LocalRanks([Repeats] * ranks), Batching())
    batch = BatchedDataDict({"given": torch.arange(6.0)})
    with pytest.raises(RoleError, match=rf"rank 0, in {method.__name__}: .* \(a batch that repeats a row loses them\)"):
        group.run(method, batch)
    assert group.run(Repeats.reorder, batch)["rewards"].tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            torch.ones(3),
            torch.ones(2).double(),
            r"'x' is per-row torch.float64 \[B\], but on rank 0 it is per-row torch.floa",
        ),
        (torch.ones(3, 2), torch.ones(2, 4), r"'x' is per-row torch.float32 \[B, 4\], but on rank 0 it is .* \[B, 2\]"),
        (["a"] * 3, torch.ones(2), r"'x' is per-row torch.float32 \[B\], but on rank 0 it is list"),
        (
            Ragged.from_rows([[1]] * 3, torch.int64),
            Ragged.from_rows([[1.0]] * 2, torch.float32),
            r"'x' is per-token torch.float32 \[B\], but on rank 0 it is per-token torch.int64",
        ),
    ],
)
def test_columns_of_another_kind_on_one_rank_are_named(first: Any, second: Any, message: str):
    batch = tiny_rollouts(SIZES).keep(["input_ids"])
    plan = WorkerGroup("judge", LocalRanks([Worker] * 2), Batching(mode="fixed", micro_batch_size=2)).plan(batch)
    shards = batch.shard(plan)
    assert [shard.num_rows for shard in shards] == [3, 2]
    results = [shard.keep([]).union({"x": x}) for shard, x in zip(shards, (first, second), strict=True)]
    with pytest.raises(RoleError, match=message) as wrong:
        restored(batch, shards, results, plan=plan, call=CALL)
    assert wrong.value.rank == 1


def test_a_rank_without_a_row_may_lack_columns():
    batch = tiny_rollouts(SIZES[:1]).keep(["input_ids"])
    plan = WorkerGroup("judge", LocalRanks([Worker] * 2), Batching()).plan(batch)
    shards = batch.shard(plan)
    results = [s.keep([]).union({"rewards": torch.ones(s.num_rows)} if s.num_rows else {}) for s in shards]
    assert restored(batch, shards, results, plan=plan, call=CALL)["rewards"].tolist() == [1.0]


def test_a_merge_that_fails_is_an_error_of_its_role():
    group = WorkerGroup("counter", LocalRanks([Counter] * 2), Batching())
    with pytest.raises(RoleError, match="role counter, some rank, in count: the merge of its ranks' results raised Ke"):
        group.run(Counter.count, tiny_rollouts(SIZES))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rewards": torch.ones(5)}, r"some rank, in score: it returned the columns rewards, without 'quarantined'"),
        (
            {"quarantined": torch.ones(5, dtype=torch.bool)},
            "without 'rewards'; a role that scores returns rewards, flo",
        ),
        (
            {"rewards": torch.tensor([0, 1, 2, float("nan"), float("inf")])},
            r"rank [01], in score: row 3 has the reward nan and is not quarantined; .* true where a row has no finite",
        ),
    ],
)
def test_what_is_no_score_is_refused_and_says_what_is(columns: dict[str, Any], message: str):
    batch = tiny_rollouts(SIZES).keep(["input_ids"])
    plan = WorkerGroup("judge", LocalRanks([Worker] * 2), Batching()).plan(batch)
    if "rewards" in columns and len(columns) == 1 and not columns["rewards"].isfinite().all():
        columns = columns | {"quarantined": torch.zeros(5, dtype=torch.bool)}
    with pytest.raises(RoleError, match=message):
        check_scores("judge", "score", batch.keep([]).union(columns), plan, {"uid"}, layout=TWO_DATA_RANKS)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["uid", "answer", "effort"],
            r"it returned the shard's own columns answer, uid; start from shard.keep\(\[\]\)",
        ),
        (
            ["answer"],
            r"a column 'answer', the name of a column of the dataset or .* shard.keep\(\[\]\), .* other names",
        ),
        (["uid"], "a column 'uid', the name of a column of the step, which its shard has"),
        (["finish_reason"], "it adds a column 'finish_reason', the name of a column of the step; rename the column"),
        (["clip_low"], "it adds a column 'clip_low', the name of a key of `algorithm`; rename the column"),
        (["style"], "it adds a column 'style', the name of a column of the step or of an earlier role; rename"),
    ],
)
def test_a_column_with_the_name_of_another_is_refused_and_says_whose(names: list[str], message: str):
    batch = tiny_rollouts(SIZES).keep(["input_ids"])
    plan = WorkerGroup("judge", LocalRanks([Worker] * 2), Batching()).plan(batch)
    scores = batch.keep([]).union({"rewards": torch.ones(5), "quarantined": torch.zeros(5, dtype=torch.bool)})
    scores, reserved = scores.union({name: ["a"] * 5 for name in names}), {"finish_reason", "clip_low", "style"}
    with pytest.raises(RoleError, match=message):
        check_scores("judge", "score", scores, plan, reserved, given=("uid", "answer"), layout=TWO_DATA_RANKS)


@pytest.mark.parametrize(
    ("counter", "message"),
    [
        (
            {"reward_failure": torch.zeros(5, dtype=torch.bool)},
            r"its column 'reward_failure' is per-row torch.bool \[B\], but the name is reserved for a counter, per-row "
            r"torch.int64 \[B\] of 0 to 4; rename the column",
        ),
        ({"reward_failure": torch.full((5,), 9)}, r"'reward_failure' contains 9, but .* of 0 to 4; rename"),
        ({"reward_failure": torch.full((5,), -1)}, "'reward_failure' contains -1"),
        ({"reward_retries": [0] * 5}, "'reward_retries' is list, but"),
        ({"reward_retries": torch.zeros(5, 2, dtype=torch.int64)}, r"'reward_retries' is .*int64 \[B, 2\]"),
        ({"reward_output_bytes": torch.full((5,), -7)}, "'reward_output_bytes' contains -7, but .* of 0 or more"),
        ({"reward_output_bytes": torch.ones(5)}, r"'reward_output_bytes' is per-row torch.float32 \[B\]"),
    ],
)
def test_a_column_that_counts_nothing_cannot_have_the_name_of_a_counter(counter: dict[str, Any], message: str):
    batch = tiny_rollouts(SIZES).keep(["input_ids"])
    plan = WorkerGroup("judge", LocalRanks([Worker] * 2), Batching()).plan(batch)
    scores = batch.keep([]).union({"rewards": torch.ones(5), "quarantined": torch.zeros(5, dtype=torch.bool)})
    with pytest.raises(RoleError, match=message):
        check_scores("judge", "score", scores.union(counter), plan, layout=TWO_DATA_RANKS)


def test_every_kind_of_failure_is_counted():
    assert COUNTERS["reward_failure"] == len(FAILURES)
    batch = tiny_rollouts(SIZES).keep(["input_ids"])
    plan = WorkerGroup("judge", LocalRanks([Worker] * 2), Batching()).plan(batch)
    failures = torch.arange(len(FAILURES) + 1)
    counters = {"reward_failure": failures, "reward_output_bytes": 1 << failures, "reward_retries": failures}
    scores = batch.keep([]).union({"rewards": torch.ones(5), "quarantined": failures > 0, **counters})
    check_scores("judge", "score", scores, plan, layout=TWO_DATA_RANKS)


def test_a_row_that_is_quarantined_may_hold_anything():
    batch = tiny_rollouts(SIZES).keep(["input_ids"])
    plan = WorkerGroup("judge", LocalRanks([Worker] * 2), Batching()).plan(batch)
    found = {"rewards": torch.full((5,), float("nan")), "quarantined": torch.ones(5, dtype=torch.bool)}
    scores = batch.keep([]).union(found | {"verbosity": torch.ones(5)})
    check_scores("judge", "score", scores, plan, {"uid"}, layout=TWO_DATA_RANKS)


def test_a_wrong_score_is_blamed_on_the_rank_that_returned_it_where_data_ranks_have_replicas():
    layout, batch = ParallelLayout(dp_shard=2, tp=2, pp=2), tiny_rollouts([(1, 1)] * 4).keep(["input_ids"])
    plan = make_plan([2] * 4, Batching(mode="fixed", micro_batch_size=1), dp_size=2)
    # Pipeline stages are outermost: ranks 4 to 7 run the last stage, and of each pair of tp ranks the first returns.
    for dp_rank, rank in ((0, 4), (1, 6)):
        for row in plan.rank_plan(dp_rank).rows.tolist():
            rewards = torch.zeros(4)
            rewards[row] = torch.nan
            scores = batch.keep([]).union({"rewards": rewards, "quarantined": torch.zeros(4, dtype=torch.bool)})
            with pytest.raises(RoleError, match=f"row {row} has the reward nan") as wrong:
                check_scores("judge", "score", scores, plan, layout=layout)
            assert wrong.value.rank == rank


@pytest.mark.parametrize(("rows", "rank"), [(2, 0), (1, None)])
def test_a_rank_is_named_only_if_the_plan_decides_it(rows: int, rank: int | None):
    """Calls in the background with fewer rows than data ranks go to all data ranks in turn."""
    batch = tiny_rollouts(SIZES[:rows]).keep(["input_ids"])
    plan = make_plan(batch["input_ids"].lengths.numpy(), Batching(mode="fixed", micro_batch_size=1), dp_size=2)
    assert rank is None or list(plan.rank_plan(0).rows) == [0]
    broken = {"rewards": torch.full((rows,), torch.nan), "quarantined": torch.zeros(rows, dtype=torch.bool)}
    with pytest.raises(RoleError, match="row 0 has the reward nan") as wrong:
        check_scores("judge", "score", batch.keep([]).union(broken), plan, layout=TWO_DATA_RANKS)
    assert wrong.value.rank == rank
