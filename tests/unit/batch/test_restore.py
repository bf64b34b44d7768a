"""Sharding by real plans: rows are restored in order for any mode, number of ranks and operations in between."""

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError, MissingColumnError
from rlpack.batch.ragged import Ragged
from rlpack.packing import Batching, PackingError, make_plan

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "worked_examples.json").read_text())
few = settings(max_examples=25, deadline=None)

LENGTHS = st.lists(st.integers(0, 16), max_size=20)
BATCHINGS = st.one_of(
    st.builds(Batching, mode=st.just("packed"), max_tokens=st.just(32), pad_to_multiple=st.sampled_from([1, 4])),
    st.builds(Batching, mode=st.just("dynamic"), max_tokens=st.just(32), length_multiple=st.sampled_from([1, 8])),
    st.builds(
        Batching, mode=st.just("fixed"), max_tokens=st.sampled_from([None, 32]), micro_batch_size=st.integers(1, 4)
    ),
)
RANKS = st.integers(1, 4)
MINI = st.sampled_from([None, 1, 5, 7])


def make(lengths: list[int]) -> BatchedDataDict:
    """Return a batch whose tokens encode their row and position."""
    rows = [[100 * row + place for place in range(n)] for row, n in enumerate(lengths)]
    return BatchedDataDict(
        {
            "input_ids": Ragged.from_rows(rows, torch.int64),
            "prompts": Ragged.from_rows([[row] for row in range(len(lengths))], torch.int64),
            "place": torch.arange(len(lengths)),
            "uid": [f"row {row}" for row in range(len(lengths))],
        }
    )


def plan_of(batch: BatchedDataDict, batching: Batching, ranks: int, mini: int | None = None):
    return make_plan(batch.token_counts().numpy(), batching, dp_size=ranks, mini_batch_size=mini)


def work(shard: BatchedDataDict) -> BatchedDataDict:
    """Process every microbatch as a role does: scatter tokens into slots, compute, gather the results from slots."""
    outputs = []
    for step in range(shard.num_steps):
        for view in shard.microbatches(step):
            assert view.is_dummy == (view.rows.num_rows == 0)
            assert shard.row_ids[view.index].tolist() == view.rows.row_ids.tolist()
            tokens = view.rows.ragged("input_ids")
            model_input = torch.full(view.layout.shape, -1).flatten()
            model_input[torch.from_numpy(view.layout.slots)] = tokens.values
            positions = torch.from_numpy(view.layout.position_ids).flatten()[torch.from_numpy(view.layout.slots)]
            answer = model_input[torch.from_numpy(view.layout.slots)]
            outputs.append(
                BatchedDataDict(
                    {
                        "twice": tokens.with_values(answer * 2),
                        "positions": tokens.with_values(positions),
                        "sums": torch.tensor([int(row.sum()) for row in tokens.rows()], dtype=torch.int64),
                        "names": [f"{uid}!" for uid in view.rows["uid"]],
                    },
                    row_ids=view.rows.row_ids,
                )
            )
    if not outputs:
        return BatchedDataDict({}, row_ids=[])
    return BatchedDataDict.concat(outputs)


def assert_worked(batch: BatchedDataDict, result: BatchedDataDict, lengths: list[int]) -> None:
    assert result.row_ids.tolist() == batch.row_ids.tolist()
    if not lengths:
        return
    assert result["twice"].values.tolist() == (batch["input_ids"].values * 2).tolist()
    assert result["twice"].lengths.tolist() == lengths
    assert result["positions"].values.tolist() == [place for n in lengths for place in range(n)]
    assert result["sums"].tolist() == [int(row.sum()) for row in batch["input_ids"].rows()]
    assert result["names"] == [f"{uid}!" for uid in batch["uid"]]


@few
@given(LENGTHS, BATCHINGS, RANKS, MINI)
def test_results_come_back_in_the_first_order(lengths, batching, ranks, mini):
    batch = make(lengths)
    plan = plan_of(batch, batching, ranks, mini)
    shards = batch.shard(plan)
    assert sum(shard.num_rows for shard in shards) == len(lengths)
    assert_worked(batch, batch.restore([work(shard) for shard in shards]), lengths)
    restored = batch.restore(shards)
    assert restored["input_ids"].values.tolist() == batch["input_ids"].values.tolist()
    assert (restored["place"].tolist(), restored["uid"]) == (batch["place"].tolist(), batch["uid"])


@few
@given(LENGTHS, BATCHINGS, RANKS, MINI, st.randoms(use_true_random=False))
def test_shards_survive_reorder_copy_and_pickling(lengths, batching, ranks, mini, random):
    batch = make(lengths)
    shards = []
    for shard in batch.shard(plan_of(batch, batching, ranks, mini)):
        order = list(range(shard.num_rows))
        random.shuffle(order)
        shards.append(copy.copy(pickle.loads(pickle.dumps(shard.select(order), protocol=5))))
    random.shuffle(shards)
    assert_worked(batch, batch.restore([work(shard) for shard in shards]), lengths)


@few
@given(LENGTHS, st.lists(st.tuples(BATCHINGS, RANKS), min_size=2, max_size=3))
def test_roles_with_different_batching_agree_about_rows(lengths, roles):
    batch = make(lengths)
    for number, (batching, ranks) in enumerate(roles):
        result = batch.restore([work(shard) for shard in batch.shard(plan_of(batch, batching, ranks))])
        batch = batch.union(result.rename({name: f"{name} {number}" for name in result}))
    for number in range(len(roles) if lengths else 0):
        assert batch[f"twice {number}"].values.tolist() == (batch["input_ids"].values * 2).tolist()
        assert batch[f"names {number}"] == [f"{uid}!" for uid in batch["uid"]]


@few
@given(LENGTHS, BATCHINGS, RANKS, st.data())
def test_ids_of_an_earlier_selection_are_restored_too(lengths, batching, ranks, data):
    whole = make(lengths)
    rows = data.draw(st.permutations(range(len(lengths))))[: len(lengths) // 2 + 1]
    batch = whole.select(rows)
    result = batch.restore([work(shard) for shard in batch.shard(plan_of(batch, batching, ranks))])
    assert_worked(batch, result, [lengths[row] for row in rows])


@few
@given(LENGTHS, BATCHINGS, RANKS, MINI, st.data())
def test_a_subset_leaves_microbatches_smaller_never_fewer(lengths, batching, ranks, mini, data):
    batch = make(lengths)
    for shard in batch.shard(plan_of(batch, batching, ranks, mini)):
        remaining = data.draw(st.lists(st.booleans(), min_size=shard.num_rows, max_size=shard.num_rows))
        subset = shard.select(np.array(remaining, dtype=bool))
        for step in range(shard.num_steps):
            before, after = list(shard.microbatches(step)), list(subset.microbatches(step))
            assert len(before) == len(after)
            ids = set(subset.row_ids.tolist())
            for old, new in zip(before, after, strict=True):
                assert new.rows.row_ids.tolist() == [row for row in old.rows.row_ids.tolist() if row in ids]
                assert new.is_dummy == (new.rows.num_rows == 0)
        assert sum(view.rows.num_rows for step in range(subset.num_steps) for view in subset.microbatches(step)) == sum(
            remaining
        )


def test_an_emptied_microbatch_is_as_small_as_a_dummy():
    for batching in (Batching(max_tokens=16), Batching(mode="dynamic", max_tokens=16, length_multiple=4)):
        [shard] = make([16, 15]).shard(plan_of(make([16, 15]), batching, 1))
        views = list(shard.select([0]).microbatches())
        assert sorted(view.layout.shape[1] for view in views) == [batching.length_multiple, 16]


class CountedOps(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_operations_do_not_grow_with_the_rows(overlong):
    counts = []
    for repeats in (20, 100):
        batch = make([3, 20, 0, 7] * repeats).keep(["input_ids", "place"])
        plan = plan_of(batch, Batching(max_tokens=16, overlong=overlong), 2)
        with CountedOps() as ops:
            batch.restore(batch.shard(plan), plan=plan)
            batch.select(np.arange(batch.num_rows)[::-1]).repeat_interleave(2).padded("input_ids")
            Ragged.from_padded(batch.padded("input_ids"), batch["input_ids"].lengths)
        counts.append(ops.count)
    assert counts[0] == counts[1]


def test_ids_are_sorted_once_for_all_microbatches_of_a_step(monkeypatch: pytest.MonkeyPatch):
    (shard,) = make([1] * 64).shard_by_batch_size(1, sequence_packing={"max_tokens": 4})
    calls = []
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda *args, **kwargs: calls.append(1) or argsort(*args, **kwargs))
    assert len(list(shard.select(range(1, 64)).microbatches())) == 16
    assert len(calls) == 1
    assert len(list(shard.microbatches())) == 16
    assert len(calls) == 1  # all rows are present, in order


def test_a_microbatch_is_pickled_without_the_shards_ids():
    (shard,) = make([1] * 2_000).keep(["place"]).shard_by_batch_size(1, 2)
    rows = next(shard.microbatches()).rows
    assert len(pickle.dumps(rows)) < 8 * shard.num_rows


def test_ranks_always_walk_the_same_number_of_microbatches():
    shards = make([16, 1, 1]).shard_by_batch_size(4, sequence_packing={"max_tokens": 16})
    assert len({len(list(shard.microbatches())) for shard in shards}) == 1
    assert any(view.is_dummy for shard in shards for view in shard.microbatches())


@pytest.mark.parametrize("case", GOLDEN["sharding"], ids=str)
def test_plain_sharding_is_that_of_the_golden_cases(case):
    batch = make([1] * case["rows"])
    shards = batch.shard_by_batch_size(case["shards"], case["batch_size"])
    assert [shard.row_ids.tolist() for shard in shards] == case["rank_rows"]
    assert [shard["place"].tolist() for shard in shards] == case["rank_rows"]
    assert {len(list(shard.microbatches(step))) for shard in shards for step in range(shard.num_steps)} == {1}


def test_a_batch_without_tokens_can_be_sharded_plainly():
    batch = BatchedDataDict({"place": torch.arange(5)})
    shards = batch.shard_by_batch_size(2)
    assert sorted(row for shard in shards for row in shard["place"].tolist()) == list(range(5))
    assert batch.restore(shards)["place"].tolist() == list(range(5))
    with pytest.raises(DataError, match="no column 'input_ids'"):
        batch.shard_by_batch_size(2, sequence_packing={})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["packed", "dynamic", "fixed"])
def test_dropped_rows_come_back_as_zeros(mode, ranks):
    batch = make([3, 9, 2])
    plan = plan_of(batch, Batching(mode=mode, max_tokens=4, overlong="drop"), ranks)
    results = [work(shard) for shard in batch.shard(plan)]
    result = batch.restore(results, plan=plan)
    assert result["twice"].lengths.tolist() == [3, 9, 2]
    assert result["twice"].values.tolist() == [0, 2, 4, *[0] * 9, 400, 402]
    assert result["sums"].tolist() == [3, 0, 401]
    assert result["names"] == ["row 0!", None, "row 2!"]
    with pytest.raises(DataError, match=r"1 of 3 rows were not returned, the first is 1; .*restore\(outputs, plan"):
        batch.restore(results)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["packed", "dynamic", "fixed"])
def test_truncated_rows_are_cut_and_come_back_filled_with_zeros(mode, ranks):
    batch = make([3, 9, 2])
    plan = plan_of(batch, Batching(mode=mode, max_tokens=4, overlong="truncate"), ranks)
    shards = batch.shard(plan)
    assert sorted(n for shard in shards for n in shard["input_ids"].lengths.tolist()) == [2, 3, 4]
    assert all(shard["prompts"].lengths.tolist() == [1] * shard.num_rows for shard in shards)
    result = batch.restore([work(shard) for shard in shards], plan=plan)
    assert result["twice"].lengths.tolist() == [3, 9, 2]
    assert result["twice"].values.tolist() == [0, 2, 4, 200, 202, 204, 206, 0, 0, 0, 0, 0, 400, 402]
    assert result["sums"].tolist() == [3, 100 + 101 + 102 + 103, 401]


def test_columns_with_lengths_of_their_own_come_back_as_they_are():
    batch = make([3, 9, 2])
    plan = plan_of(batch, Batching(max_tokens=4, overlong="truncate"), 2)
    result = batch.restore([shard.keep(["prompts"]) for shard in batch.shard(plan)], plan=plan)
    assert result["prompts"].values.tolist() == [0, 1, 2]


def test_lost_doubled_and_foreign_rows_are_errors():
    batch = make([3, 4, 2])
    shards = batch.shard(plan_of(batch, Batching(max_tokens=8), 2))
    with pytest.raises(DataError, match="rows were not returned"):
        batch.restore(shards[:1])
    with pytest.raises(DataError, match="was returned 2 times"):
        batch.restore([*shards, shards[0]])
    with pytest.raises(DataError, match="row id 7 is not from this batch"):
        batch.restore([*shards, BatchedDataDict({**make([1])}, row_ids=[7])])
    with pytest.raises(DataError, match="'uid' is not in all batches"):
        batch.restore([shards[0], shards[1].drop(["uid"])])
    with pytest.raises(DataError, match="at least one rank"):
        batch.restore([])


def test_rows_whose_ids_nobody_passed_are_not_restored():
    batch = make([1, 2, 3])
    (shard,) = batch.shard_by_batch_size(1, dynamic_batching={"max_tokens": 3})
    assert shard.row_ids.tolist() == [0, 2, 1]
    with pytest.raises(DataError, match=r"result 1 has rows without ids, .* or pass `row_ids=shard.row_ids`"):
        batch.restore([shard.select([]), BatchedDataDict({"place": shard["place"]})])
    result = BatchedDataDict({"place": shard["place"]}, row_ids=shard.row_ids)
    assert batch.restore([BatchedDataDict({}), result])["place"].tolist() == [0, 1, 2]


def test_rows_selected_from_the_batch_itself_are_restored():
    batch = make([1, 2, 3])
    for parts in (
        *([batch.keep(["place"])], [batch.select([2, 0, 1])], [batch.select([0, 1]), batch.select([2])]),
        *(batch.split([3]), [BatchedDataDict.concat(batch.split([1, 2]))], [pickle.loads(pickle.dumps(batch))]),
        [BatchedDataDict.concat([batch, make([])])],
    ):
        assert batch.restore(parts)["place"].tolist() == [0, 1, 2]
    others = make([1, 2, 3]).split([2, 1])
    for foreign in (
        others,
        [batch.select([0, 1]), others[1]],
        [BatchedDataDict.concat([batch.select([0]), others[1]])],
    ):
        with pytest.raises(DataError, match="has rows without ids"):
            batch.restore(foreign)


@pytest.mark.parametrize(
    "repeat",
    [
        lambda shard: shard.repeat_interleave(1),
        lambda shard: shard.select([0, 0, 1]),
        lambda shard: BatchedDataDict.concat([shard, shard]).select([0, 1, 5]),
    ],
)
def test_repeated_rows_of_a_shard_are_never_taken_for_other_rows(repeat):
    batch = make([1, 2, 3])
    (shard,) = batch.shard_by_batch_size(1, dynamic_batching={"max_tokens": 3})
    repeated = repeat(pickle.loads(pickle.dumps(shard)))
    with pytest.raises(DataError, match="rows without ids"):
        batch.restore([repeated])
    with pytest.raises(DataError, match="row id -1 is not from this batch"):
        batch.restore([BatchedDataDict({"place": repeated["place"]}, row_ids=repeated.row_ids)])


def test_a_plan_fits_the_batch_it_was_made_for():
    plan = plan_of(make([3, 4, 2]), Batching(max_tokens=8), 2)
    with pytest.raises(DataError, match="the plan is for 3 rows and the batch has 2"):
        make([3, 4]).shard(plan)
    with pytest.raises(DataError, match="4 tokens for row 1, which has 1"):
        make([3, 1, 2]).shard(plan)
    with pytest.raises(
        DataError, match=r"2 tokens for row 2, which has 5; make the plan from the batch's token_counts"
    ):
        make([3, 4, 5]).shard(plan)
    plan = plan_of(make([3, 9, 2]), Batching(max_tokens=4, overlong="truncate"), 2)
    with pytest.raises(DataError, match="9 tokens for row 1, which has 8"):  # it would be cut to 4 all the same
        make([3, 8, 2]).shard(plan)


def test_a_plan_that_truncates_needs_the_column_it_was_made_from():
    batch = make([3, 9, 2]).rename({"input_ids": "tokens"})
    lengths = batch.token_counts("tokens").numpy()
    plan = make_plan(lengths, Batching(max_tokens=4, overlong="truncate"), dp_size=1)
    with pytest.raises(
        MissingColumnError, match=r"truncates 1 of 3 rows, .* no column 'input_ids' to cut; set lengths_from="
    ):
        batch.shard(plan)
    (shard,) = batch.shard(plan, lengths_from="tokens")
    assert sorted(shard["tokens"].lengths.tolist()) == [2, 3, 4]
    (shard,) = batch.shard(make_plan(lengths, Batching(max_tokens=16), dp_size=1))  # there is nothing to cut
    assert shard.num_rows == 3


def test_two_kinds_of_batching_exclude_each_other():
    batch = make([1])
    with pytest.raises(DataError, match="sequence_packing and dynamic_batching are mutually exclusive"):
        batch.shard_by_batch_size(1, sequence_packing={}, dynamic_batching={})
    with pytest.raises(DataError, match="dynamic_batching has mode=packed; it must be dynamic"):
        batch.shard_by_batch_size(1, dynamic_batching=Batching(mode="packed"))
    with pytest.raises(PackingError, match="sequence 0 has 9 tokens"):
        make([9]).shard_by_batch_size(1, sequence_packing={"max_tokens": 8})


@pytest.mark.parametrize("argument", ["sequence_packing", "dynamic_batching"])
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            {"max_token": 8},
            "has the unknown key 'max_token'; the keys are mode, max_tokens, micro_batch_size, .*, overlong",
        ),
        ({"max_tokens": 8, 3: 4}, "has the unknown key 3; the keys are mode"),
        (True, "is a bool; pass a Batching, or a mapping"),
        ("packed", "is a str; pass a Batching, or a mapping"),
    ],
)
def test_a_key_of_no_batching_is_named(argument, spec, text):
    with pytest.raises(DataError, match=f"{argument} {text}"):
        make([1]).shard_by_batch_size(1, **{argument: spec})


def test_a_shards_plan_goes_when_a_row_comes_twice():
    shard = make([3, 4]).shard_by_batch_size(1)[0]
    assert shard.copy().plan is shard.plan
    assert shard.select([1]).num_steps == 1
    assert BatchedDataDict.concat(shard.split([1, 1])).num_steps == 1
    for changed in (shard.select([0, 0]), shard.repeat_interleave(2), BatchedDataDict.concat([shard, shard])):
        assert changed.plan is None
