"""The driver's handle of one role: shards a batch by a plan, runs the ranks, restores the order.

Invariants (tests/distributed/test_worker_group.py):

1. a sharded call returns rows in the order of the batch it was given, whatever the role's batching;
2. the plan of a call depends on the batch's lengths and the role's batching alone, so two calls on the same rows with
   the same `mini_batches` share their microbatches exactly;
3. every wait has a deadline, and the first failure of a rank ends the wait for all.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import numpy as np

from rlpack.data.batch import BatchedDataDict
from rlpack.data.columns import lengths_of
from rlpack.distributed.dispatch import Dispatch, dispatch_of
from rlpack.distributed.errors import RoleError
from rlpack.distributed.returns import restored
from rlpack.packing import Batching, Cost, MicrobatchPlan, make_plan

logger = logging.getLogger(__name__)

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")


class Ranks(Protocol):
    """The processes behind a group; `RayRanks` is the real one."""

    @property
    def num_ranks(self) -> int:
        """Return the count of processes."""
        ...

    def call(
        self, role: str, method: str, args_of_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Run `method` on as many ranks as there are argument tuples; results in rank order."""
        ...

    def call_rows(
        self, role: str, method: str, args_of_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[BatchedDataDict]:
        """Run `method`, which returns rows, as `call` does; their tokens may stay where they were made."""
        ...

    def begin_rows(
        self, role: str, method: str, args_of_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> Callable[[], list[BatchedDataDict]]:
        """Start `method`, which returns rows, beside what the ranks do next; what is returned waits for its rows."""
        ...

    def transfer(self, source: tuple[str, str], target: Any, load: tuple[str, str], extra: tuple[Any, ...]) -> None:
        """Hand rank 0's result of one method to a method of all ranks of `target`, past the driver's memory."""
        ...


class WorkerGroup(Generic[W]):
    """The ranks of one role.

    Methods are named by the function itself, `group.run(ActorWorker.logprobs, batch)`, so a type checker checks the
    arguments and a rename finds every caller. What runs is the method of that name of the role's own class, and that
    one's decorator says how.
    """

    def __init__(
        self,
        role: str,
        ranks: Ranks,
        batching: Batching,
        mini_batch_size: int | None = None,
        kind: type[Any] | None = None,
        cost: Cost | None = None,
    ) -> None:
        """Take the processes of a role.

        Args:
            role: its name.
            ranks: the processes.
            batching: how its calls are batched.
            mini_batch_size: sequences of an optimizer step, for methods that ask for mini-batches.
            kind: its class; None where the methods' own one will do.
            cost: of a sequence, by which plans balance ranks; None counts slots.
        """
        self.role = role
        self.ranks = ranks
        self.batching = batching
        self.mini_batch_size = mini_batch_size
        self._kind = kind
        self._cost = cost
        self._newest: dict[bool, MicrobatchPlan] = {}

    @property
    def num_ranks(self) -> int:
        """Return the count of data-parallel ranks."""
        return self.ranks.num_ranks

    def plan(self, batch: BatchedDataDict, *, mini_batches: bool = False) -> MicrobatchPlan:
        """Return the plan that a sharded call on `batch` follows; calls on the same lengths share one."""
        lengths = _token_counts(batch)
        newest = self._newest.get(mini_batches)
        if newest is None or not np.array_equal(newest.request.lengths, lengths):
            newest = make_plan(
                lengths,
                self.batching,
                dp_size=self.num_ranks,
                mini_batch_size=self.mini_batch_size if mini_batches else None,
                cost=self._cost,
            )
            self._newest[mini_batches] = newest
        return newest

    def run(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the role as its dispatch decorator says.

        Raises:
            RoleError: a rank raised, died, missed its deadline, or returned what is no result of its shard.
            PackingError: the batch of a sharded call cannot be planned.
        """
        dispatch = dispatch_of(method if self._kind is None else getattr(self._kind, method.__name__))
        if dispatch.kind == "sharded":
            batch, *rest = args
            assert isinstance(batch, BatchedDataDict), f"{method.__qualname__} is sharded: its argument is a batch"
            return self._run_sharded(method.__name__, dispatch, batch, tuple(rest), dict(kwargs))
        called = self.num_ranks if dispatch.kind == "broadcast" else 1
        return self.ranks.call(self.role, method.__name__, [tuple(args)] * called, dict(kwargs))[0]

    def begin(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Callable[[], R]:
        """Start a sharded method and return what waits for its result.

        One that is marked `beside` runs while the ranks answer other calls; any other runs when it is waited for.
        """
        dispatch = dispatch_of(method if self._kind is None else getattr(self._kind, method.__name__))
        if not dispatch.beside:
            return lambda: self.run(method, *args, **kwargs)
        batch, *rest = args
        assert isinstance(batch, BatchedDataDict), f"{method.__qualname__} is sharded: its argument is a batch"
        name, plan = method.__name__, self.plan(batch, mini_batches=dispatch.mini_batches)
        shards = batch.shard(plan)
        finish = self.ranks.begin_rows(self.role, name, [(shard, *rest) for shard in shards], dict(kwargs))
        return lambda: cast(R, restored(batch, shards, finish(), plan=plan, call=(self.role, name)))

    def _run_sharded(
        self, name: str, dispatch: Dispatch, batch: BatchedDataDict, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plan = self.plan(batch, mini_batches=dispatch.mini_batches)
        shards = batch.shard(plan)
        args = [(shard, *rest) for shard in shards]
        if dispatch.merge is None:
            results = self.ranks.call_rows(self.role, name, args, kwargs)
            return restored(batch, shards, results, plan=plan, call=(self.role, name))
        results = self.ranks.call(self.role, name, args, kwargs)
        try:
            return dispatch.merge(results)
        except Exception as error:  # a role's own function: anything may come
            text = f"the merge of its ranks' results raised {type(error).__name__}: {error}"
            raise RoleError(self.role, None, name, text) from error

    def transfer(
        self,
        export: Callable[[W], Any],
        target: "WorkerGroup[Any]",
        load: Callable[..., None],
        *extra: Any,
    ) -> None:
        """Give rank 0's result of `export`, a collective, to `load` on every rank of `target`, past the driver."""
        self.ranks.transfer((self.role, export.__name__), target.ranks, (target.role, load.__name__), extra)


def _token_counts(batch: BatchedDataDict) -> np.ndarray:
    """Return the tokens of each row; rows without tokens (texts to score, say) weigh the same."""
    lengths = lengths_of(batch.get("input_ids", []))
    return np.ones(batch.num_rows, dtype=np.int64) if lengths is None else lengths.numpy()
