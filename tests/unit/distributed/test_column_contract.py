"""What a method declares is what its ranks get, and what comes back is what it declares."""

from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import MissingColumnError
from rlpack.distributed.column_contract import producers_of
from rlpack.distributed.dispatch import dispatched_methods, sharded
from rlpack.distributed.errors import RoleError
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.testing.local_ranks import LocalRanks
from rlpack.worker import TEXT_COLUMNS, Worker
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import PolicyGradientLoss, SFTLoss
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_config, tiny_rollouts

SIZES = [(3, 9), (5, 1), (4, 0), (2, 16)]


def weights_of(loss: str, scale: float = 1.0) -> tuple[str, ...]:
    return ("response_mask", f"{loss}_weight")


class Reader(Worker):
    """Returns the names of the columns that it was sent, and how many tokens of each row."""

    @sharded(reads=("response_mask",), optional=("advantages", "returns"), returns=("names",))
    def read(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)

    @sharded(reads=("input_ids", TEXT_COLUMNS))
    def read_texts(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)

    @sharded(reads=weights_of)
    def read_weights(self, shard: BatchedDataDict, loss: str, scale: float = 1.0) -> BatchedDataDict:
        return self._names(shard)

    @sharded()
    def read_all(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)

    @sharded(reads=("response_mask",), returns=("names", "sums"))
    def forget(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)

    @sharded(reads=("response_mask",))
    def count(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard.keep([]).union({"counts": shard["response_mask"].lengths})

    def _names(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard.keep([]).union({"names": [" ".join(sorted(shard))] * shard.num_rows})


class Plain(Reader):
    """Stands in for `Reader`, with decorators that declare nothing."""

    @sharded()
    def read(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)

    @sharded()
    def forget(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)


class Curious(Reader):
    """Overrides methods of `Reader`, and reads more or less than they do."""

    @sharded(optional=("policy_weight", "absent"))
    def read(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)

    @sharded(reads=("uid",))
    def read_texts(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)

    @sharded(optional=("uid",))
    def read_all(self, shard: BatchedDataDict) -> BatchedDataDict:
        return self._names(shard)


def group(kind: type[Reader] = Reader, batching: Batching | None = None, **options: Any) -> WorkerGroup[Reader]:
    return WorkerGroup("reader", LocalRanks([kind] * 2), batching or Batching(), role_class=kind, **options)


def batch() -> BatchedDataDict:
    rows = tiny_rollouts(SIZES).keep(["input_ids", "response_mask", "uid"])
    return rows.union({"advantages": torch.ones(len(SIZES)), "policy_weight": torch.ones(len(SIZES))})


@pytest.mark.parametrize("kind", [Reader, Plain])
def test_only_the_columns_that_a_method_reads_are_sent(kind: type[Reader]):
    assert set(group(kind).run(Reader.read, batch())["names"]) == {"advantages response_mask"}
    without = batch().drop(["advantages"])
    assert set(group(kind).run(Reader.read, without)["names"]) == {"response_mask"}


def test_an_override_adds_optional_columns_and_its_own_reads_replace_those_it_overrides():
    names = set(group(Curious).run(Reader.read, batch())["names"])
    assert names == {"advantages policy_weight response_mask"}
    assert set(group(Curious).run(Reader.read_texts, batch())["names"]) == {"uid"}
    everything = " ".join(sorted(batch()))
    assert set(group(Curious).run(Reader.read_all, batch())["names"]) == {everything}


def test_all_texts_can_be_read_and_without_a_declaration_everything():
    rows = batch().union({"answer": ["1"] * len(SIZES)})
    assert set(group().run(Reader.read_texts, rows)["names"]) == {"answer input_ids uid"}
    everything = "advantages answer input_ids policy_weight response_mask uid"
    assert set(group().run(Reader.read_all, rows)["names"]) == {everything}


def test_columns_may_depend_on_the_other_arguments():
    assert set(group().run(Reader.read_weights, batch(), "policy")["names"]) == {"policy_weight response_mask"}
    with pytest.raises(MissingColumnError, match=r"reader.read_weights reads the column 'value_weight'"):
        group().run(Reader.read_weights, batch(), "value", scale=2.0)


def test_a_missing_column_is_named_with_what_returns_it_before_any_rank_is_called():
    readers = group(producers={"response_mask": ["rollout.generate"]})
    text = (
        r"reader.read reads the column 'response_mask', and the batch has only input_ids; "
        r"'response_mask' is returned by rollout.generate"
    )
    with pytest.raises(MissingColumnError, match=text):
        readers.submit(Reader.read, batch().keep(["input_ids"]))


@pytest.mark.parametrize("kind", [Reader, Plain])
def test_a_declared_column_that_does_not_come_back_is_named(kind: type[Reader]):
    with pytest.raises(
        RoleError, match=r"role reader, some rank, in forget: it returned the columns names, without 's"
    ):
        group(kind).run(Reader.forget, batch())


def test_rows_are_truncated_by_the_plan_where_token_ids_are_not_read():
    counts = group(batching=Batching(max_tokens=10, overlong="truncate")).run(Reader.count, batch())["counts"]
    assert counts.tolist() == [10, 6, 4, 10]


def test_what_built_in_roles_read_and_return():
    contracts = {f"rollout.{name}": call.columns for name, call in dispatched_methods(RolloutWorker).items()}
    assert producers_of(contracts)["rollout_logprobs"] == ["rollout.advance", "rollout.generate"]
    train = dispatched_methods(ActorWorker)["train_step"].columns
    settings = tiny_config().algorithm
    rows = (
        batch()
        .keep(["input_ids", "response_mask"])
        .union({name: torch.ones(len(SIZES)) for name in ("loss_weight", "token_weight", "advantages", "rewards")})
    )
    sent = train.columns_to_send(rows, [SFTLoss(), 0.1], {}, call="actor.train_step", producers={})
    assert sent == ["input_ids", "response_mask", "loss_weight", "token_weight"]
    with pytest.raises(MissingColumnError, match=r"actor.train_step reads the column 'logprobs'"):
        train.columns_to_send(
            rows, [PolicyGradientLoss(settings, temperature=1.0)], {}, call="actor.train_step", producers={}
        )


def test_a_method_with_a_merge_declares_no_columns_that_come_back():
    with pytest.raises(ValueError, match="returns no rows; leave out returns or merge"):
        sharded(returns=("logprobs",), merge=list)
