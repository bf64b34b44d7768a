"""Ranks of a role in this process, one after the other: what `WorkerGroup` needs of ranks, without Ray."""

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.offload import offload
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import RoleError
from rlpack.distributed.results import check_is_rows
from rlpack.testing.comparison import difference


class LocalRanks:
    """One role on ranks that are objects of this process; what goes in and out is pickled, as on its way elsewhere."""

    def __init__(self, builders: Sequence[Callable[[RankContext], Any]], pool: str = "main") -> None:
        """Build a role object for each rank."""
        size = len(builders)
        self._workers = [build(RankContext(pool, rank, size)) for rank, build in enumerate(builders)]

    @property
    def num_ranks(self) -> int:
        """Return the count of ranks."""
        return len(self._workers)

    def call(
        self, role: str, method: str, args_of_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Run `method` on as many ranks as there are argument tuples; results in rank order.

        Raises:
            RoleError: a rank raised, wrote into what it was given, or returned what can't be pickled.
        """
        return [self._on(rank, role, method, args, kwargs) for rank, args in enumerate(args_of_rank)]

    def begin_rows(
        self,
        role: str,
        method: str,
        args_of_rank: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        *,
        beside: bool = False,
    ) -> Callable[[], list[BatchedDataDict]]:
        """Run `method`, which returns rows, now, and give them or its error when they are waited for.

        Raises:
            RoleError: on waiting; as in `call`, and for a result that is no batch with row ids, or has columns that
                can't be sent.
        """
        made: Future[list[BatchedDataDict]] = Future()
        ranks = enumerate(args_of_rank)
        try:
            made.set_result([self._on(rank, role, method, args, kwargs, check=_sendable_rows) for rank, args in ranks])
        except RoleError as error:
            made.set_exception(error)
        return made.result

    def transfer(self, source: tuple[str, str], target: Any, load: tuple[str, str], extra: tuple[Any, ...]) -> None:
        """Hand rank 0's result of one method to a method of all ranks of `target`."""
        value = self.call(*source, [()] * self.num_ranks, {})[0]
        target.call(*load, [(value, *extra)] * target.num_ranks, {})

    def _on(
        self,
        rank: int,
        role: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        check: Callable[[Any, str], Any] = lambda result, where: result,
    ) -> Any:
        """Run a method on one rank, and see that its result passes `check`."""
        sent = pickle.dumps(args)
        given = pickle.loads(sent)
        try:
            result = getattr(self._workers[rank], method)(*given, **kwargs)
        except Exception as error:  # a user's role may raise anything
            raise RoleError(role, rank, method, f"{type(error).__name__}: {error}") from error
        self._check_unchanged(rank, role, method, pickle.loads(sent), given)
        try:
            return pickle.loads(pickle.dumps(check(result, f"{type(self._workers[rank]).__name__}.{method}")))
        except DataError as error:
            raise RoleError(role, rank, method, f"DataError: {error}") from error
        except Exception as error:  # whatever a role's own objects raise while they are pickled
            text = f"what it returned can't be pickled, so it can't leave its process: {type(error).__name__}: {error}"
            raise RoleError(role, rank, method, text) from error

    def _check_unchanged(
        self, rank: int, role: str, method: str, before: tuple[Any, ...], after: tuple[Any, ...]
    ) -> None:
        for one, other in zip(before, after, strict=True):
            if isinstance(one, BatchedDataDict) and (changed := difference(one, other, tolerance=0.0)):
                text = (
                    f"it wrote into its shard ({changed}), which on a cluster is memory that other roles read; make a "
                    "column of your own: column.clone()"
                )
                raise RoleError(role, rank, method, text)


def _sendable_rows(result: Any, where: str) -> BatchedDataDict:
    offload(check_is_rows(result, where))
    return result
