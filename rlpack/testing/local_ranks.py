"""`LocalRanks`: the ranks of a role in this process, run one after the other, without Ray."""

import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.offload import offload
from rlpack.distributed.calls import Call, Pending, Relay
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import RoleError
from rlpack.distributed.failures import place_in_user_code
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.results import check_is_rows
from rlpack.distributed.usage import Usage
from rlpack.testing.comparison import difference
from rlpack.user_code import UserCode, describe_exception


class LocalRanks:
    """One role on ranks that are objects of this process.

    Arguments and results are pickled, as between processes.
    """

    is_restartable = False

    def __init__(
        self,
        builders: Sequence[Callable[[RankContext], Any]],
        pool: str = "main",
        layout: ParallelLayout | None = None,
    ) -> None:
        """Build a role object for each rank; without a layout all are data ranks."""
        layout = ParallelLayout(dp_shard=len(builders)) if layout is None else layout
        self._workers = [build(RankContext(pool, rank, layout)) for rank, build in enumerate(builders)]

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self._workers)

    @property
    def num_starts(self) -> int:
        """Return 1: objects of this process are never restarted."""
        return 1

    @property
    def nodes(self) -> list[str]:
        """Return the same node for all ranks."""
        return ["this process"] * self.num_ranks

    def after_restart(self, key: Any, function: Callable[[], None]) -> None:
        """Do nothing: there is no restart."""
        del key, function

    def submit(self, call: Call) -> Pending[list[Any]]:
        """Run a call now; waiting returns its results or raises.

        Raises:
            RoleError: on waiting; a rank raised, wrote into its arguments, returned something that can't be pickled,
                or did not return rows as declared.
        """
        outcome: Future[list[Any]] = Future()
        check = _sendable_rows if call.returns_rows else _anything
        try:
            given = zip(call.called, call.args_of_rank, strict=True)
            results = {rank: self._on(rank, call, args, check) for rank, args in given}
            outcome.set_result([results[rank] for rank in call.outputs])
        except RoleError as error:
            outcome.set_exception(error)
        return Pending(outcome.result)

    def wait_any(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[int]:
        """Return all: calls have run when `submit` returns."""
        del timeout_s
        return list(range(len(pending)))

    def discard_submitted(self) -> list[str]:
        """Return nothing: calls have run when `submit` returns."""
        return []

    def relay(self, relays: Sequence[Relay], target: Any, kept: list[Any] | None = None) -> list[Any]:
        """Pass values to all ranks of `target`, one after the other; `kept` gets copies of them.

        Returns the results of the last load.
        """
        results: list[Any] = []
        values = [] if kept is None else kept
        values.clear()
        for relay in relays:
            role, method, args = relay.export
            value = self.submit(Call(role, method, [args] * self.num_ranks, {})).result()[relay.owner]
            values.append(pickle.loads(pickle.dumps(value)))
            results = target.load_again(values[-1:], [relay])
        return results

    def load_again(self, values: Sequence[Any], relays: Sequence[Relay]) -> list[Any]:
        """Load values that an earlier `relay` kept; return the results of the last load."""
        results: list[Any] = []
        for value, relay in zip(values, relays, strict=True):
            role, method, args = relay.load
            results = self.submit(Call(role, method, [(value, *args)] * self.num_ranks, {})).result()
        return results

    def pop_usage(self, role: str) -> dict[str, Usage]:
        """Return nothing: calls in this process are not measured."""
        del role
        return {}

    def apply(self, function: Callable[..., Any], *args: Any) -> Pending[list[Any]]:
        """Run a function once for each rank."""
        return Pending(lambda: [function(*args) for _ in self._workers])

    def _on(self, rank: int, call: Call, args: tuple[Any, ...], check: Callable[[Any, str], Any]) -> Any:
        """Run a call on one rank, and return its result once it passes `check`."""
        role, method = call.role, call.method
        pickled = pickle.dumps(args)
        received = pickle.loads(pickled)
        try:
            with UserCode():
                result = getattr(self._workers[rank], method)(*received, **call.kwargs)
        except Exception as error:  # a user's role may raise anything
            place = place_in_user_code("".join(traceback.format_exception(error)))
            failure = RoleError(role, rank, method, f"{describe_exception(error)}{place}")
            failure.original = error
            raise failure from error
        self._check_unchanged(rank, role, method, pickle.loads(pickled), received)
        try:
            return pickle.loads(pickle.dumps(check(result, f"{type(self._workers[rank]).__name__}.{method}")))
        except DataError as error:
            raise RoleError(role, rank, method, f"DataError: {error}") from error
        except Exception as error:  # pickling runs a role's own code
            text = (
                f"its result can't be pickled, so it can't leave its process: {describe_exception(error)}; return "
                "tensors, Ragged columns, and lists of texts or numbers"
            )
            raise RoleError(role, rank, method, text) from error

    def _check_unchanged(
        self, rank: int, role: str, method: str, before: tuple[Any, ...], after: tuple[Any, ...]
    ) -> None:
        for one, other in zip(before, after, strict=True):
            if isinstance(one, BatchedDataDict) and (changed := difference(one, other, tolerance=0.0)):
                text = (
                    f"it wrote into its shard ({changed}), which on a cluster is memory that other roles read; make a "
                    "copy: copy.deepcopy(column)"
                )
                raise RoleError(role, rank, method, text)


def _anything(result: Any, where: str) -> Any:
    return result


def _sendable_rows(result: Any, where: str) -> BatchedDataDict:
    offload(check_is_rows(result, where))
    return result
