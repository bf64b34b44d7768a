"""Contracts that make a role's results independent of plans, the number of ranks and the order of rows.

They are checked in this process, in this order:

1. dispatch: the method is decorated with `@sharded()` and returns rows;
2. build: `from_settings` makes the role from configuration, tokenizer and arguments;
3. returns: every row comes back once, under its id, with the declared columns, which can be pickled; the shard is
   unchanged;
4. scores: a scoring role returns `rewards` and `quarantined`, a reward is finite or its row is quarantined;
5. determinism: the same rows give the same result in a second call, and from a newly built object;
6. order: rows given in another order come back in that order, each with its own result;
7. sizes: in batches of 0, 1 and prime numbers of rows, each row gets the result that it got in the whole batch;
8. batching: packed, dynamic and fixed microbatches give the same results;
9. ranks: so does any number of ranks, even if there are more ranks than rows.

tests/unit/testing has a role that breaks each of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import lengths_of
from rlpack.batch.errors import DataError, MissingColumnError
from rlpack.batch.fields import FIELDS
from rlpack.config.schema import Algorithm, Config
from rlpack.distributed.context import RankContext
from rlpack.distributed.dispatch import dispatch_of
from rlpack.distributed.errors import RoleError
from rlpack.distributed.results import check_scores
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.testing.comparison import difference
from rlpack.testing.errors import ContractError
from rlpack.testing.local_ranks import LocalRanks
from rlpack.testing.samples import sample_batch, sample_tokenizer
from rlpack.user_code import UserCode, describe_exception

_PRIMES = (2, 3, 5, 7, 11, 13)
# For errors that say the fix themselves.
_SAID = ""


def check_role(
    kind: type[Any],
    method: Callable[..., Any] | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    config: Config | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch: BatchedDataDict | None = None,
    ranks: Sequence[int] = (1, 2, 3),
    tolerance: float = 1e-5,
) -> None:
    """Check that a role keeps its contracts, in this process and without Ray.

    Call it from a test: `check_role(BrevityWorker, arguments={"n": 3})`. A role whose ranks communicate
    (`torch.distributed`) needs a process per rank: check it with `check_role_on_ray`, and here only with `ranks=(1,)`.

    Args:
        kind: the role's class.
        method: a sharded method that returns rows; None for `score`, for which more is checked.
        arguments: arguments of the role's section, `roles.<name>.arguments`.
        config: passed to `from_settings`; None for the defaults.
        tokenizer: passed to `from_settings`; None for one that can encode `sample_batch`.
        batch: rows to call the method on, preferably more than 6; None for `sample_batch()`.
        ranks: numbers of ranks to try; contract 8 is checked on two ranks, or on one if these are at most one.
        tolerance: absolute and relative tolerance of floats.

    Raises:
        ContractError: names the broken contract, the symptom and the fix.
        ValueError: the batch has no rows.
    """
    role = RoleUnderTest.of(kind, method, arguments, config, tokenizer, tolerance)
    rows = sample_batch() if batch is None else batch
    if not rows.num_rows:
        raise ValueError("the batch has no rows to check a role on; give some, preferably more than 6")
    expected = role.run(rows, "returns", _SAID)
    role.check_scores(rows, expected)
    _check_determinism(role, rows, expected)
    _check_order(role, rows, expected)
    _check_sizes(role, rows, expected)
    _check_batching(role, rows, expected, min(2, max(ranks, default=2)))
    _check_ranks(role, rows, expected, ranks)


@dataclass(frozen=True)
class RoleUnderTest:
    """A role's class, and how its objects are built.

    Attributes:
        name: name of the class, for messages.
        kind: the class.
        method: the sharded method that is called.
        build: builds the object of one rank.
        tolerance: see `check_role`.
        built: the ranks built so far, by number of ranks; reused because building a role may take long.
    """

    name: str
    kind: type[Any]
    method: Callable[..., Any]
    build: Callable[[RankContext], Any]
    tolerance: float
    built: dict[int, LocalRanks] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: type[Any],
        method: Callable[..., Any] | None,
        arguments: Mapping[str, Any] | None,
        config: Config | None,
        tokenizer: PreTrainedTokenizerBase | None,
        tolerance: float,
    ) -> "RoleUnderTest":
        """Return the role of `check_role`'s arguments.

        Raises:
            ContractError: the method can't be checked.
        """
        called = check_dispatch(kind, method)

        def build(context: RankContext) -> Any:
            try:
                with UserCode():
                    return kind.from_settings(
                        context, config or Config(), tokenizer or sample_tokenizer(), **arguments or {}
                    )
            except Exception as error:  # a user's role may raise anything
                remedy = "fix from_settings, or give check_role the config and the arguments that it reads"
                problem = f"{kind.__name__}.from_settings raised {describe_exception(error)}"
                raise ContractError("build", problem, remedy) from error

        return cls(kind.__name__, kind, called, build, tolerance)

    def group(self, count: int = 1, batching: Batching | None = None, *, rebuild: bool = False) -> WorkerGroup[Any]:
        """Return the role on `count` ranks of this process; with `rebuild`, newly built ones."""
        if rebuild or count not in self.built:
            self.built[count] = LocalRanks([self.build] * count)
        return WorkerGroup(self.name, self.built[count], batching or Batching(), role_class=self.kind)

    def run(
        self, batch: BatchedDataDict, contract: str, remedy: str, group: WorkerGroup[Any] | None = None
    ) -> BatchedDataDict:
        """Return the result for a batch; an error counts as a breach of `contract`.

        The role runs on one rank unless a group is given.
        """
        with broken(contract, remedy):
            return (group or self.group()).run(self.method, batch)

    def check_scores(
        self, batch: BatchedDataDict, result: BatchedDataDict, plan_of: WorkerGroup[Any] | None = None
    ) -> None:
        """Check the result of a scoring role, unless another method is checked."""
        if self.method.__name__ != "score":
            return
        reserved = {*FIELDS, *Algorithm.model_fields}
        with broken("scores", _SAID):
            group = plan_of or self.group()
            check_scores(self.name, "score", result, group.plan(batch), reserved, given=batch, layout=group.layout)

    def compare(
        self, expected: BatchedDataDict, result: BatchedDataDict, contract: str, when: str, remedy: str
    ) -> None:
        """Raise unless two results are equal; `when` says how the second was obtained."""
        if differing := difference(expected, result, tolerance=self.tolerance):
            raise ContractError(contract, f"{self.name}.{self.method.__name__} {when}: {differing}", remedy)


def check_dispatch(kind: type[Any], method: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the method that is checked, `score` when None.

    Raises:
        ContractError: the class lacks it, or it returns no rows.
    """
    name = "score" if method is None else method.__name__
    remedy = f"write it as `@sharded() def {name}(self, shard)`"
    if not any(name in vars(parent) for parent in kind.__mro__):
        raise ContractError("dispatch", f"{kind.__name__} has no method {name}", remedy)
    called = getattr(kind, name)
    try:
        dispatch = dispatch_of(called)
    except TypeError as error:
        raise ContractError("dispatch", str(error), remedy) from error
    if dispatch.kind != "sharded" or dispatch.merge is not None:
        how = "has a merge" if dispatch.kind == "sharded" else f"is {dispatch.kind}"
        raise ContractError("dispatch", f"{kind.__name__}.{name} {how}, so it returns no rows", remedy)
    return called


@contextmanager
def broken(contract: str, remedy: str) -> Iterator[None]:
    """Translate an error of the role into a `ContractError` for `contract`."""
    try:
        yield
    except MissingColumnError as error:  # of the driver: one of the role itself is the cause of a RoleError
        raise ContractError(contract, str(error), _SAID) from error
    except (RoleError, DataError) as error:
        raise ContractError(contract, str(error), remedy) from error


def _check_determinism(role: RoleUnderTest, batch: BatchedDataDict, expected: BatchedDataDict) -> None:
    remedy = "draw random numbers from a seed that the row gives (its uid), and keep no state between calls"
    for when, rebuild in (("called again", False), ("built again", True)):
        result = role.run(batch, "determinism", remedy, role.group(rebuild=rebuild))
        role.compare(expected, result, "determinism", f"returns different results when {when}", remedy)


def _check_order(role: RoleUnderTest, batch: BatchedDataDict, expected: BatchedDataDict) -> None:
    remedy = "compute a row from its own columns, and return results under the ids of the rows that they belong to"
    order = np.random.default_rng(0).permutation(batch.num_rows)
    result = role.run(batch.select(order), "order", remedy)
    restored = result.select(np.argsort(order))
    role.compare(
        expected, restored, "order", "returns a different result for a row when rows come in another order", remedy
    )


def _check_sizes(role: RoleUnderTest, batch: BatchedDataDict, expected: BatchedDataDict) -> None:
    remedy = "compute a row from its own columns alone, and let a rank without a row return its columns empty"
    for size in [count for count in (0, 1, *_PRIMES) if count < batch.num_rows]:
        result = role.run(batch.select(np.arange(size)), "sizes", f"it was given {size} of the rows; {remedy}")
        if size:
            when = f"returns a different result for a row when it is one of {size}"
            role.compare(expected.select(np.arange(size)), result, "sizes", when, remedy)
        elif set(result) != set(expected):
            problem = f"{role.name} returns the columns {sorted(result)} for no rows, {sorted(expected)} for some"
            raise ContractError("sizes", problem, remedy)


def _check_batching(role: RoleUnderTest, batch: BatchedDataDict, expected: BatchedDataDict, num_ranks: int) -> None:
    remedy = "let nothing depend on how many microbatches there are, on which rows share one, or on its padding"
    lengths = lengths_of(batch.get("input_ids", []))
    longest = max(1, 1 if lengths is None else int(lengths.max()))
    batchings = (
        Batching(max_tokens=longest),
        Batching(mode="dynamic", max_tokens=2 * longest),
        Batching(mode="fixed", max_tokens=None, micro_batch_size=2),
        Batching(max_tokens=8 * longest, pad_to_multiple=4, min_microbatches=3),
    )
    for batching in batchings:
        result = role.run(batch, "batching", f"batching was {batching}; {remedy}", role.group(num_ranks, batching))
        role.compare(expected, result, "batching", f"returns different results under {batching}", remedy)


def _check_ranks(role: RoleUnderTest, batch: BatchedDataDict, expected: BatchedDataDict, ranks: Sequence[int]) -> None:
    remedy = "let nothing depend on context.rank, or on which rows share a rank"
    for count in ranks:
        for given in (batch, batch.select([0])):
            result = role.run(given, "ranks", f"there were {count} ranks; {remedy}", role.group(count))
            when = f"returns different results on {count} ranks"
            role.compare(expected.select(np.arange(given.num_rows)), result, "ranks", when, remedy)
