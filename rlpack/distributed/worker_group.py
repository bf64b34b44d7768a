"""`WorkerGroup`: the driver's handle of one role, and the path of a call from `run` to the restored rows.

    driver                                            ranks of the role (one process each)
    ------                                            -----------------------------------
    run(Role.method, batch) = submit(...).result()
      │ columns_to_send: those that the method reads
      │ plan: rows ─► data rank, step, microbatch
      │ shard: handles of payloads, no tokens
      │ ──────── Call ───────────────────────────►    method(shard): reads payloads in place
      │                                               offload: token-sized columns stay on the rank
    Pending.result()  ◄─── stubs and sizes ──────     (waits for the driver)
      │ reserve: room in the object store
      │ ──────── store_columns ──────────────────►    payloads ─► object store, under the driver's lease
      │ ◄─────── object handles ─────────────────
      │ restored: rows in the batch's order, checked
      ▼
    batch of handles

Who consumes what, waits for whom, and is unblocked by what:

- `submit` consumes a batch of handles and waits for nothing. `Pending.result` waits for every rank of the call and for
  room in the store; it is unblocked by the last rank, by the first failure of a rank, or by the deadline.
- A rank consumes its calls in the order of submission and waits for the payloads of its shard, which are stored before
  the call is submitted, and in collectives for the other ranks. Background calls consume their own queue, one
  thread per role.
- `reserve` waits for another thread to release payloads; it is unblocked by a release, or by its deadline.

Invariants (tests/distributed/test_worker_group.py):

1. a sharded call returns rows in the order of the batch it was given, whatever the role's batching;
2. the plan of a call depends only on the batch's lengths and group ids, on what the method declares, and on the role's
   settings (batching, mini-batch size, cost, layout); calls that are given one plan share their microbatches exactly;
3. every wait has a deadline, and the first failure of a rank ends the wait for all.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import lengths_of
from rlpack.distributed.calls import Call, Pending
from rlpack.distributed.column_contract import Producers
from rlpack.distributed.dispatch import Dispatch, declared_columns, dispatch_of, own_version
from rlpack.distributed.errors import PlacementError, RoleError
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.ranks_protocol import Ranks
from rlpack.distributed.results import check_columns, restored
from rlpack.packing import Batching, Cost, MicrobatchPlan, PackingError, make_plan
from rlpack.spans import span

logger = logging.getLogger(__name__)

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")


class WorkerGroup(Generic[W]):
    """The ranks of one role.

    `seed`, an integer that the driver sets at each step, seeds the packer `first_fit_shuffle` in the group's plans.

    Methods are named by the function itself, `group.run(ActorWorker.logprobs, batch)`, so a type checker checks the
    arguments and a rename finds every caller. The role's own class may override the method: then its version runs, as
    its decorator declares.
    """

    def __init__(
        self,
        role: str,
        ranks: Ranks,
        batching: Batching,
        mini_batch_size: int | None = None,
        role_class: type[Any] | None = None,
        cost: Cost | None = None,
        producers: Producers | None = None,
        layout: ParallelLayout | None = None,
    ) -> None:
        """Wrap the processes of a role.

        Args:
            role: its name.
            ranks: the processes.
            batching: how its calls are batched.
            mini_batch_size: sequences of an optimizer step, for methods that ask for mini-batches.
            role_class: its class; None for the class of the methods.
            cost: cost model of a sequence, used to balance ranks; None counts token slots.
            producers: methods of the run's roles that return each column, for messages.
            layout: how its ranks divide rows and the model; None for data ranks only. It raises the alignment and the
                divisor of `batching` to what it needs.

        Raises:
            PlacementError: the layout is for another number of ranks.
        """
        self.layout = ParallelLayout(dp_shard=ranks.num_ranks) if layout is None else layout
        if self.layout.world_size != ranks.num_ranks:
            raise PlacementError(
                f"role {role} has {ranks.num_ranks} ranks, and {self.layout} needs {self.layout.world_size}"
            )
        self.role, self.ranks = role, ranks
        self.batching, self.mini_batch_size = self.layout.align(batching), mini_batch_size
        self._role_class, self._cost = role_class, cost
        self._producers: Producers = producers or {}
        self._plan: MicrobatchPlan | None = None
        self._turns = _Turns(self.dp_size)  # shared by copies of the group
        self.seed = 0

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.ranks.num_ranks

    @property
    def dp_size(self) -> int:
        """Return the number of data ranks."""
        return self.layout.dp_size

    def plan(
        self,
        batch: BatchedDataDict,
        *,
        mini_batches: bool = False,
        whole_groups: bool = False,
        batching: Batching | None = None,
    ) -> MicrobatchPlan:
        """Plan a sharded call on `batch`.

        Calls that have to share microbatches are given one plan (`with_plan`).

        Args:
            batch: `input_ids`, whose tokens are counted; rows without tokens all weigh the same.
            mini_batches: split it into optimizer steps of the role's mini-batch size.
            whole_groups: keep all rows with the same `group_ids` in one microbatch.
            batching: batching of this call, aligned like the role's; None for the role's own.

        Raises:
            PackingError: the batch cannot be planned; a group exceeds the budget or spans optimizer steps, for example.
        """
        batching = self.layout.align(self.batching if batching is None else batching)
        shares = batching.share_prompts and {"input_ids", "group_ids", "prompt_lengths"} <= set(batch)
        with span(f"plan {self.role}"):
            return make_plan(
                _token_counts(batch),
                batching,
                dp_size=self.dp_size,
                mini_batch_size=self.mini_batch_size if mini_batches else None,
                groups=batch["group_ids"].numpy() if whole_groups or shares else None,
                split_groups=not whole_groups,
                prefixes=batch["prompt_lengths"].numpy() if shares else None,
                cost=self._cost,
                seed=self.seed,
            )

    def with_plan(self, plan: MicrobatchPlan) -> Self:
        """Return this group with `plan` used for its sharded calls.

        The plan must have been made for a batch of the same lengths and for as many data ranks as this group has.
        """
        group = copy.copy(self)
        group._plan = plan
        return group

    def run_at_every_start(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the role as `run` does, and again whenever its ranks are started again.

        Use it for methods that set the role's state, such as its weights: a restart only builds the role. Of several
        calls of a method, the last is repeated.
        """
        result = self.run(method, *args, **kwargs)
        self.ranks.after_restart((self.role, method.__name__), lambda: self._run_again(method, *args, **kwargs))
        return result

    def _run_again(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.run(method, *args, **kwargs)

    def run(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the role and wait for its result.

        Raises:
            RoleError: a rank raised, died, missed its deadline, or returned something other than the rows of its shard.
            MissingColumnError: the batch of a sharded call lacks a column that the method reads.
            PackingError: the batch of a sharded call cannot be planned.
        """
        return self.submit(method, *args, **kwargs).result()

    def submit(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start a method of the role as its decorator declares.

        A background method runs while the ranks answer other calls. Any other runs before later calls of the same
        processes; if it fails, they fail with its error, since ranks may be blocked in a collective.

        Raises:
            RoleError: raised by `Pending.result`, as in `run`.
            MissingColumnError: the batch of a sharded call lacks a column that the method reads.
            PackingError: the batch of a sharded call cannot be planned.
            TypeError: an argument is a list, tuple or dict with a batch, whose columns the ranks could not read.
        """
        dispatch = self._dispatch(method)
        _refuse_nested_batches(method, [*args, *kwargs.values()])
        if dispatch.kind == "sharded":
            return self._submit_sharded(method, dispatch, args, dict(kwargs))
        num_called = self.num_ranks if dispatch.kind == "broadcast" else 1
        args_of_rank = [tuple(args)] * num_called
        pending = self.ranks.submit(Call(self.role, method.__name__, args_of_rank, dict(kwargs), output_ranks=(0,)))
        return Pending(lambda: pending.result()[0])

    def submit_to(
        self,
        rank: int,
        method: Callable[..., BatchedDataDict],
        batch: BatchedDataDict,
        *args: Any,
        of_start: int | None = None,
        answer_s: float | None = None,
    ) -> Pending[BatchedDataDict]:
        """Start a method that is marked `@one_rank` on a rank, with all rows of a batch.

        Args:
            rank: the rank.
            method: the method.
            batch: the rows.
            args: further arguments of the method.
            of_start: `ranks.num_starts` at the first call whose rows the rank may still hold; None for the current
                value.
            answer_s: deadline of the answer, in seconds from now; None for that of `Pending.result`.

        Raises:
            RanksRestartedError: the ranks were started again since, so rows that they held are lost; raised here or by
                `Pending.result`.
            RoleError: raised by `Pending.result`: the rank raised, died or was late, or its rows lack a column.
            MissingColumnError: the batch lacks a column that the method reads.
        """
        columns = self._dispatch(method).columns
        call = f"{self.role}.{method.__name__}"
        names = columns.columns_to_send(batch, args, {}, call=call, producers=self._producers)
        rows = BatchedDataDict(dict(batch.keep(names)), row_ids=batch.row_ids)
        start = self.ranks.num_starts if of_start is None else of_start
        limits = {"of_start": start, "answer_s": answer_s}
        pending = self.ranks.submit(
            Call(self.role, method.__name__, [(rows, *args)], {}, returns_rows=True, ranks=(rank,), **limits)
        )

        def result_rows() -> BatchedDataDict:
            (result,) = pending.result()
            check_columns(result, columns, call=(self.role, method.__name__))
            return result

        return Pending(result_rows, pending.answers)

    def discard_submitted(self) -> list[str]:
        """Drop the results of this thread's calls that have not been requested, and return the names of the calls.

        These are the calls of all roles on the same processes. Nobody may wait for one of them afterwards.

        Raises:
            RoleError: one of them failed, or missed its deadline.
        """
        return self.ranks.discard_submitted()

    def _submit_sharded(
        self, method: Callable[..., Any], dispatch: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Pending[Any]:
        """Start a sharded method.

        Its result is rows in the batch's order, or that of its merge.
        """
        batch, rest = next(iter(args), None), args[1:]
        if not isinstance(batch, BatchedDataDict):
            given = f"a {type(batch).__name__}" if args else "none"
            raise TypeError(
                f"{method.__qualname__} is sharded: its first positional argument must be a BatchedDataDict, and "
                f"{given} was given; pass the batch by position, run(method, batch)"
            )
        columns = dispatch.columns.overriding(declared_columns(method))
        names = columns.columns_to_send(
            batch, rest, kwargs, call=f"{self.role}.{method.__name__}", producers=self._producers
        )
        whole_groups = dispatch.needs_whole_groups is not None and dispatch.needs_whole_groups(*rest, **kwargs)
        plan = self._plan_of_call(batch, mini_batches=dispatch.mini_batches, whole_groups=whole_groups)
        batch = batch.keep(dict.fromkeys([*names, "input_ids"]) if "input_ids" in batch else names)
        # A background call takes part in no collective, so ranks without rows don't need it.
        planned = _data_ranks_with_rows(plan) if dispatch.background else range(self.dp_size)
        kept = [shard.keep(names) for shard in batch.shard(plan, ranks=planned)]  # truncated rows: cut by input_ids
        data_ranks = self._turns.in_turn(planned)
        shards = dict(zip(data_ranks, kept, strict=True))
        called = [rank for rank in range(self.num_ranks) if self.layout.dp_rank_of(rank) in shards]
        call = Call(
            self.role,
            method.__name__,
            [(shards[self.layout.dp_rank_of(rank)], *rest) for rank in called],
            kwargs,
            returns_rows=dispatch.merge is None,
            output_ranks=tuple(self.layout.output_ranks[rank] for rank in data_ranks),
            background=dispatch.background,
            ranks=tuple(called) if dispatch.background else None,
        )
        pending = self.ranks.submit(call)
        if dispatch.merge is not None:
            return Pending(partial(self._merged, dispatch.merge, pending, call.method))

        def result_rows() -> BatchedDataDict:
            where = (self.role, call.method)
            rows = restored(batch, kept, pending.result(), plan=plan, call=where, ranks=call.outputs)
            check_columns(rows, columns, call=where)
            return rows

        # The answer to a background call says that it was started.
        return Pending(result_rows, () if dispatch.background else pending.answers)

    def _merged(self, merge: Callable[[list[Any]], Any], pending: Pending[list[Any]], method: str) -> Any:
        """Merge the ranks' results with the role's merge function."""
        results = pending.result()
        try:
            return merge(results)
        except Exception as error:  # a role's own function may raise anything
            text = f"the merge of its ranks' results raised {type(error).__name__}: {error}"
            raise RoleError(self.role, None, method, text) from error

    def _plan_of_call(self, batch: BatchedDataDict, *, mini_batches: bool, whole_groups: bool) -> MicrobatchPlan:
        """Return the plan that a call follows: its own, unless it was given one (`with_plan`)."""
        if self._plan is None:
            return self.plan(batch, mini_batches=mini_batches, whole_groups=whole_groups)
        if self._plan.num_ranks != self.dp_size:
            raise PackingError(
                f"a call of {self.role} was given a plan for another number of data ranks ({self._plan.num_ranks} "
                f"instead of {self.dp_size}); make it with the `plan` method of {self.role}'s own group"
            )
        if not np.array_equal(self._plan.request.lengths, _token_counts(batch)):
            raise PackingError(f"a call of {self.role} was given the plan of a batch with other lengths")
        if whole_groups and (self._plan.request.groups is None or self._plan.request.split_groups):
            raise PackingError(f"a call of {self.role} needs microbatches of whole groups; plan with whole_groups=True")
        return self._plan

    def _dispatch(self, method: Callable[..., Any]) -> Dispatch:
        """Return how a method is called: as the role's own class declares."""
        return dispatch_of(method if self._role_class is None else own_version(self._role_class, method))


class _Turns:
    """The data ranks of calls with fewer rows than data ranks, in turn.

    A plan gives such rows to the lowest data ranks. Background calls of several groups would all wait for these.
    """

    def __init__(self, dp_size: int) -> None:
        self._dp_size, self._next, self._lock = dp_size, 0, Lock()

    def in_turn(self, planned: Sequence[int]) -> Sequence[int]:
        """Return the data ranks that get the rows of the planned ones."""
        if len(planned) == self._dp_size:
            return planned
        with self._lock:
            first, self._next = self._next, (self._next + len(planned)) % self._dp_size
        return [(rank + first) % self._dp_size for rank in planned]


def _refuse_nested_batches(method: Callable[..., Any], values: Sequence[Any]) -> None:
    for value in values:
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if any(isinstance(one, BatchedDataDict) for one in within):
            raise TypeError(
                f"{method.__qualname__} was given a {type(value).__name__} with a batch, whose columns ranks can't "
                "read there; pass each batch as a separate argument"
            )


def _data_ranks_with_rows(plan: MicrobatchPlan) -> Sequence[int]:
    """Return the data ranks to which a plan gives rows, in ascending order; the first one if there are no rows."""
    return np.flatnonzero(plan.counts.sum(axis=1)).tolist() or [0]


def _token_counts(batch: BatchedDataDict) -> np.ndarray:
    """Return the tokens of each row; rows without tokens count 1."""
    lengths = lengths_of(batch.get("input_ids", []))
    return np.ones(batch.num_rows, dtype=np.int64) if lengths is None else lengths.numpy()
