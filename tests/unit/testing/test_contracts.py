"""Each contract of a role is broken once, by a role that breaks nothing else."""

import copy
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.testing import ContractError, check_role, sample_batch
from rlpack.testing.comparison import difference
from rlpack.worker import Worker, broadcast, sharded


def scored(shard: BatchedDataDict, rewards: torch.Tensor, **columns: Any) -> BatchedDataDict:
    quarantined = torch.zeros(len(rewards), dtype=torch.bool)
    return shard.keep([]).union({"rewards": rewards.float(), "quarantined": quarantined, **columns})


def lengths(shard: BatchedDataDict) -> torch.Tensor:
    return torch.tensor([float(len(text)) for text in shard["completion"]])


class Good(Worker):
    """Keeps all contracts, by tokens and by texts, with a column of each kind."""

    def __init__(self, context: Any, factor: float = 1.0) -> None:
        super().__init__(context)
        self.factor = factor

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        rows = [row for step in range(shard.num_steps) for view in shard.microbatches(step) for row in view.index]
        walked = shard.select(rows)
        tokens = walked["input_ids"]
        doubled = tokens.with_values(2 * tokens.values)
        return scored(walked, self.factor * lengths(walked), doubled=doubled, verdict=["so"] * walked.num_rows)

    @sharded()
    def double(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard.keep([]).union({"doubled": 2 * lengths(shard)})


class Undecorated(Worker):
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard))


class Broadcast(Worker):
    @broadcast
    def score(self, shard: BatchedDataDict) -> None: ...


class Merged(Worker):
    @sharded(merge=sum)
    def score(self, shard: BatchedDataDict) -> int:
        return shard.num_rows


class Mute(Worker): ...


class Unbuilt(Good):
    def __init__(self, context: Any, weight: float) -> None:
        super().__init__(context)


class UnbuiltByExit(Good):
    def __init__(self, context: Any) -> None:
        raise SystemExit(3)


class Raising(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard["level"]


class Exiting(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        raise SystemExit(3)


class Misspelt(Worker):
    @sharded(reads=("compleion",))
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard


class Undeclared(Worker):
    @sharded(returns=("effrot",))
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard))


class Short(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard.select(range(shard.num_rows - 1)), lengths(shard)[:-1])


class Anonymous(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return BatchedDataDict(dict(scored(shard, lengths(shard))))


class Bare(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> torch.Tensor:
        return lengths(shard)


class Unsendable(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard), lock=[threading.Lock() for _ in shard["uid"]])


class Trained(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard).requires_grad_())


class Writing(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        shard["input_ids"].values.add_(1)
        return scored(shard, lengths(shard))


class WritingLists(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        shard["completion"][0] = "x"
        return scored(shard, lengths(shard))


class Whole(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        found = scored(shard, lengths(shard))
        return found.drop(["rewards"]).union({"rewards": found["rewards"].long()})


class Unquarantined(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard)).drop(["quarantined"])


class NotANumber(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, 0 / lengths(shard))


class Taking(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard), prompt=shard["prompt"])


class Keeping(Worker):
    """Forgets `keep([])`."""

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard.union(dict(scored(shard, lengths(shard))))


class Random(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, torch.rand(shard.num_rows))


class Counting(Worker):
    calls = 0

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        self.calls += 1
        return scored(shard, lengths(shard) + self.calls)


class SeededOnce(Worker):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.offset = torch.rand(())

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard) + self.offset)


class ByPlace(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, torch.arange(shard.num_rows) * lengths(shard))


class Normalized(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard) - lengths(shard).sum() / 13)


class Stacking(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, torch.stack([torch.tensor(len(text)) for text in shard["completion"]]))


class Batched(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(
            shard, lengths(shard) + sum(1 for step in range(shard.num_steps) for _ in shard.microbatches(step))
        )


class Ranked(Worker):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        return scored(shard, lengths(shard) + (self.context.rank > 1))


class Collective(Worker):
    """Its ranks communicate, unless there is only one."""

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        assert self.context.num_ranks == 1, "one process has no process group"
        return scored(shard, lengths(shard))


def test_a_role_that_keeps_its_contracts_passes():
    check_role(Good)
    check_role(Good, arguments={"factor": 2.0}, batch=sample_batch(7, seed=3))
    check_role(Good, Good.double)


@pytest.mark.parametrize(
    ("kind", "contract", "message"),
    [
        (Mute, "dispatch", r"Mute has no method score; write it as `@sharded\(\) def score\(self, shard\)`"),
        (Undecorated, "dispatch", r"Undecorated.score has no dispatch decorator"),
        (Broadcast, "dispatch", "Broadcast.score is broadcast, so it returns no rows"),
        (Merged, "dispatch", "Merged.score has a merge, so it returns no rows"),
        (Unbuilt, "build", "Unbuilt.from_settings raised TypeError: .*argument: 'weight'; fix from_settings, or"),
        (UnbuiltByExit, "build", "from_settings raised SystemExit: 3; fix from_settings"),
        (Raising, "returns", r"there is no column 'level'; the .* uid \(.*test_contracts.py, line \d+\)$"),
        (Exiting, "returns", r"rank 0, in score: SystemExit: 3 \(.*test_contracts.py, line \d+\)$"),
        (Misspelt, "returns", r"'compleion' \(did you mean 'completion'\?\), .* uid; correct reads= of the method's"),
        (Undeclared, "returns", "without 'effrot', which its decorator declares; return it, or correct returns=$"),
        (Short, "returns", r"it returned 12 rows for a shard of 13, without id \d+; return every row [^;]*$"),
        (WritingLists, "returns", r"it wrote into its shard \('completion' .*; make a copy: copy.deepcopy\(column\)$"),
        (Anonymous, "returns", r"Anonymous.score returned rows without ids.*row_ids=shard.row_ids"),
        (Bare, "returns", r"Bare.score returned a Tensor; a method under @sharded\(\) returns a BatchedDataDict"),
        (Unsendable, "returns", "column 'lock' can't be pickled: .*lock' object; use texts"),
        (Trained, "returns", "column 'rewards'.*grad"),
        (Writing, "returns", r"it wrote into its shard \('input_ids' of row 0, token 0, is .*; make a copy"),
        (Whole, "returns", "'rewards' is per-row torch.int64; rlpack.batch.fields requires per-row torch.float32"),
        (Unquarantined, "scores", r"returned the columns rewards, without 'quarantined'; a role that scores returns"),
        (NotANumber, "scores", r"row 0 has the reward nan and is not quarantined; .* reward: ~rewards.isfinite\(\)$"),
        (Taking, "scores", "it returned a column 'prompt', the name of a column of the step, .* other names$"),
        (Keeping, "scores", r"it returned the shard's own columns answer, .*uid; start from shard.keep\(\[\]\)"),
        (Random, "determinism", "returns different results when called again: 'rewards' of row 0 is"),
        (Counting, "determinism", "when called again: 'rewards' of row 0 is 1.0 and 2.0; draw random"),
        (SeededOnce, "determinism", "returns different results when built again"),
        (ByPlace, "order", "when rows come in another order: 'rewards' of row"),
        (Normalized, "sizes", "returns a different result for a row when it is one of 1: 'rewards' of row 0"),
        (Stacking, "sizes", r"RuntimeError: stack expects .*test_contracts.py, line .*; it was given 0 of the"),
        (Batched, "batching", r"returns different results under Batching\(mode='packed'.*let nothing depend on how"),
        (Ranked, "ranks", "returns different results on 3 ranks: 'rewards' of row .*let nothing depend on context"),
    ],
)  # fmt: skip
def test_a_role_that_breaks_a_contract_is_told_which_and_how_to_mend_it(
    kind: type[Worker], contract: str, message: str
):
    with pytest.raises(ContractError, match=message) as found:
        check_role(kind)
    assert found.value.contract == contract
    assert found.value.remedy in str(found.value)


def test_a_check_may_be_kept_to_some_numbers_of_ranks():
    check_role(Ranked, ranks=(1, 2))
    check_role(Collective, ranks=(1,))
    with pytest.raises(ContractError, match="one process has no process group"):
        check_role(Collective)


def test_the_difference_of_batches_is_named_by_column_row_and_token():
    one = sample_batch(4)
    assert difference(one, sample_batch(4), tolerance=0.0) is None
    other = one.copy()
    other["input_ids"] = one["input_ids"].with_values(one["input_ids"].values + 0)
    other["input_ids"].values[-1] += 1
    assert "'input_ids' of row 3, token" in str(difference(one, other, tolerance=0.0))
    nan = [BatchedDataDict({"x": torch.tensor([float("nan")]), "y": [float("nan")]}) for _ in range(2)]
    assert difference(*nan, tolerance=0.0) is None
    assert difference(one, one.select([0, 1]), tolerance=0.0) == "4 and 2 rows"
    assert difference(one.keep(["uid"]), one.keep(["answer"]), tolerance=0.0) == "columns ['uid'] and ['answer']"


class Nested(Worker):
    """Its list columns hold tensors and arrays that are views, floats that round differently, and shared objects."""

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        numbers = torch.stack([lengths(shard), 0.1 * lengths(shard)], 1)
        noise = 1e-7 * torch.rand(())
        return scored(
            shard,
            lengths(shard),
            views=list(numbers),
            arrays=[{"row": row} for row in numbers.numpy()],
            floats=[[float(number + noise), None] for number in lengths(shard)],
            texts=[{"a": text, "b": text} for text in shard["completion"]],
        )


def test_list_columns_are_compared_by_value_within_the_tolerance():
    check_role(Nested)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 1.1),
        (1, 1.0),
        (True, 1),
        (float("inf"), 1.0),
        ("a", "b"),
        (["a"], ["a", "a"]),
        ({"a": 1.0}, {"a": 1.1}),
        ({"a": 1.0}, {"b": 1.0}),
        (torch.ones(2), torch.ones(2) + 0.1),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.ones(2), torch.ones(2).double()),
        (np.ones(2), np.ones(2) + 0.1),
        (np.arange(2), np.arange(2) + 1),
        (np.array(["a"]), np.array(["b"])),
        (np.array(["a", [1.0]], dtype=object), np.array(["a", [1.1]], dtype=object)),
        (np.float32(1.0), np.float32(1.1)),
        (Fraction(1, 3), Fraction(1, 2)),
    ],
)
def test_entries_of_lists_that_differ_are_named(one: Any, other: Any):
    batches = [BatchedDataDict({"x": [1.0, entry]}) for entry in (one, other)]
    assert "'x' of row 1 is" in str(difference(*batches, tolerance=1e-5))
    for entry in (one, other):
        copies = [BatchedDataDict({"x": [copy.deepcopy(entry)]}) for _ in range(2)]
        assert difference(*copies, tolerance=1e-5) is None


def test_the_sample_has_what_a_session_sends_and_no_two_rows_alike():
    batch = sample_batch(13)
    mask, tokens = batch["response_mask"], batch["input_ids"]
    assert mask.lengths.tolist() == tokens.lengths.tolist()
    prompts = [int((~row).sum()) for row in mask.rows()]
    assert prompts == [len(text) for text in batch["prompt"]]
    assert [len(text) for text in batch["completion"][:2]] == [0, 1]
    assert len(set(batch["uid"])) == 13
    assert sample_batch(1).num_rows == 1
    assert sample_batch(0).num_rows == 0
