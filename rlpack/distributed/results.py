"""Checks of a role's results. Errors name what the role returned and what it should return.

`restored` checks the rows of any sharded call, rank by rank; `check_scores` the columns of a scoring role.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch import columns as column_ops
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.fields import FIELDS, Column, describe
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn
from rlpack.batch.sharding import WITHOUT_IDS
from rlpack.config.schema import Algorithm
from rlpack.distributed.column_contract import ColumnContract
from rlpack.distributed.errors import RoleError
from rlpack.distributed.layout import ParallelLayout
from rlpack.packing import MicrobatchPlan

_ROWS = "return every row of the shard once, with its id: shard.keep([]).union({...})"
_KEEP = "start from shard.keep([]), which leaves out the shard's columns, and give those that the role adds other names"
_SCORES = (
    "a role that scores returns rewards, float32 [B], and quarantined, bool [B], which is true where a row has no "
    "finite reward"
)

# Columns in which a scoring role counts failures, output and retries, and their largest values: the kind of a failure
# is an index of `rlpack.rewards.reward_result.FAILURES` plus 1.
COUNTERS: Mapping[str, int | None] = {"reward_failure": 4, "reward_output_bytes": None, "reward_retries": None}


def check_is_rows(result: Any, where: str) -> BatchedDataDict:
    """Return the result of a method under `@sharded()`, a batch with row ids.

    Raises:
        DataError: it is not a batch, or its rows have no ids; the message begins with `where`, `Class.method`.
    """
    if not isinstance(result, BatchedDataDict):
        raise DataError(
            f"{where} returned a {type(result).__name__}; a method under @sharded() returns a BatchedDataDict with the "
            "row ids of its shard (shard.keep([]).union(...)), or declares `merge=`"
        )
    if not result.has_explicit_ids:
        raise DataError(f"{where} returned {WITHOUT_IDS}")
    return result


def restored(
    batch: BatchedDataDict,
    shards: Sequence[BatchedDataDict],
    results: Sequence[BatchedDataDict],
    *,
    plan: MicrobatchPlan,
    call: tuple[str, str],
    ranks: Sequence[int] | None = None,
) -> BatchedDataDict:
    """Return the ranks' results as rows in the order of `batch`.

    Args:
        batch: argument of the call.
        shards: the batch's rows on each data rank.
        results: result of each data rank's output rank.
        plan: plan that the batch was sharded by.
        call: role and method, for messages.
        ranks: the rank that returned each result; None for 0, 1, …

    Raises:
        RoleError: a rank returned too few rows, rows of other shards, or other columns than another rank.
    """
    by_rank = dict(zip(range(len(results)) if ranks is None else ranks, results, strict=True))
    for shard, (rank, result) in zip(shards, by_rank.items(), strict=True):
        if problem := _wrong_rows(shard.row_ids, result.row_ids):
            raise RoleError(call[0], rank, call[1], problem)
    filled = [rank for rank, result in by_rank.items() if result.num_rows]
    for rank in filled[1:]:
        if problem := _wrong_columns(by_rank[rank], by_rank[filled[0]], filled[0]):
            raise RoleError(call[0], rank, call[1], problem)
    try:
        return batch.restore(results, plan=plan)
    except DataError as error:
        raise RoleError(call[0], None, call[1], f"its results can't be combined: {error}; {_ROWS}") from error


def check_columns(rows: BatchedDataDict, columns: ColumnContract, *, call: tuple[str, str]) -> None:
    """Raise unless a result has the columns that its method declares.

    Raises:
        RoleError: one is missing.
    """
    if missing := columns.missing_from(rows):
        raise RoleError(
            call[0],
            None,
            call[1],
            f"it returned the columns {_names(rows)}, without {missing[0]!r}, which its decorator declares; "
            "return it, or correct returns=",
        )


def _wrong_rows(expected: np.ndarray, returned: np.ndarray) -> str | None:
    """Describe what is wrong with the returned row ids, int64 [n]; ids are distinct within a batch."""
    if np.array_equal(expected, returned):
        return None
    foreign, missing = np.setdiff1d(returned, expected), np.setdiff1d(expected, returned)
    if foreign.size:
        return f"it returned a row with id {foreign[0]}, which its shard does not have; {_ROWS}"
    if missing.size:
        return f"it returned {returned.size} rows for a shard of {expected.size}, without id {missing[0]}; {_ROWS}"
    return None


def _wrong_columns(rows: BatchedDataDict, first: BatchedDataDict, first_rank: int) -> str | None:
    """Describe how a rank's columns differ from the first rank's."""
    if set(rows) != set(first):
        return (
            f"it returned the columns {_names(rows)}, but rank {first_rank} returned {_names(first)}; return the same "
            "ones on every rank, whatever rows it has"
        )
    for name, column in rows.items():
        kind, other = _kind(column), _kind(first[name])
        if kind != other:
            return (
                f"its column {name!r} is {kind}, but on rank {first_rank} it is {other}; return one kind, type and "
                "shape on every rank, whatever rows it has"
            )
    return None


def _names(batch: BatchedDataDict) -> str:
    return ", ".join(sorted(batch)) or "(none)"


def _kind(column: Column) -> str:
    """Return kind, type and shape of a column, without its number of rows."""
    column = column.empty if isinstance(column, RemoteColumn) else column
    kind, dtype = describe(column)
    if isinstance(column, list):
        return kind
    values = column.values if isinstance(column, Ragged) else column
    return f"{kind} {dtype} [B{''.join(f', {size}' for size in values.shape[1:])}]"


def placeholder_rows(rows: BatchedDataDict, typed: BatchedDataDict) -> BatchedDataDict:
    """Return stand-ins for rows that no rank received: zeros, and None in lists, with the types of `typed`.

    A role's own result for no rows may have other types, which could not be concatenated with results for rows.
    """
    nowhere = [np.zeros(0, dtype=np.int64)]
    columns = column_ops.place_rows([typed.select([])], nowhere, rows.num_rows)
    for name, column in columns.items():
        lengths = column_ops.lengths_of(rows[name]) if name in rows else None
        if lengths is not None and isinstance(column, RemoteColumn):
            columns[name] = column.with_lengths(lengths)
        elif lengths is not None and isinstance(column, Ragged):
            columns[name] = Ragged(column.values.new_zeros(int(lengths.sum()), *column.values.shape[1:]), lengths)
    return rows.keep([]).union(columns)


def check_scores(
    role: str,
    method: str,
    scores: BatchedDataDict,
    plan: MicrobatchPlan,
    reserved: Collection[str] = (),
    *,
    given: Collection[str] = (),
    layout: ParallelLayout,
    row_numbers: Sequence[int] | None = None,
) -> None:
    """Raise unless `scores` is a valid result of a scoring role.

    Args:
        role: name of the role.
        method: its method.
        scores: what it returned, a whole batch in its own order.
        plan: plan that the batch was sharded by.
        layout: layout of the role's ranks.
        reserved: names that columns added by the role can't have.
        given: names of the batch's columns; they are reserved, too.
        row_numbers: number of each row, for messages, where these rows are a part of a batch; None for 0, 1, …

    Raises:
        RoleError: a column is missing, an added one has a reserved name, a counter (`COUNTERS`) has other values, or a
            reward is not a finite number and its row is not quarantined.
    """
    missing = [name for name in ("rewards", "quarantined") if name not in scores]
    if missing:
        problem = f"it returned the columns {_names(scores)}, without {missing[0]!r}; {_SCORES}"
        raise RoleError(role, None, method, problem)
    added = sorted(set(scores) - {"rewards", "quarantined"})
    if problem := _wrong_names(added, set(reserved), set(given)):
        raise RoleError(role, None, method, problem)
    for name in COUNTERS:
        if name in scores and (problem := _wrong_counter(name, scores[name])):
            raise RoleError(role, None, method, problem)
    broken = (~scores["rewards"].isfinite() & ~scores["quarantined"]).nonzero().flatten().tolist()
    if broken:
        row = broken[0]
        value = scores["rewards"][row].item()
        number = row if row_numbers is None else row_numbers[row]
        problem = f"row {number} has the reward {value} and is not quarantined; {_SCORES}: ~rewards.isfinite()"
        raise RoleError(role, _rank_of(plan, layout, row), method, problem)


def _wrong_names(added: Sequence[str], reserved: set[str], given: set[str]) -> str | None:
    """Describe which of the columns that a role added have other columns' names, and whose."""
    of_batch = [name for name in added if name in given]
    if len(of_batch) > 1:
        return f"it returned the shard's own columns {', '.join(of_batch)}; {_KEEP}"
    if of_batch:
        whose = "of the step" if of_batch[0] in (*FIELDS, "prompt") else "of the dataset or the recipe"
        return f"it returned a column {of_batch[0]!r}, the name of a column {whose}, which its shard has; {_KEEP}"
    if clash := [name for name in added if name in reserved]:
        whose = "a column of the step or of an earlier role"
        if clash[0] in Algorithm.model_fields:
            whose = "a key of `algorithm`"
        elif clash[0] in FIELDS:
            whose = "a column of the step"
        return f"it adds a column {clash[0]!r}, the name of {whose}; rename the column"
    return None


def _wrong_counter(name: str, column: Column) -> str | None:
    """Describe why a column is not the counter for which its name is reserved."""
    largest = COUNTERS[name]
    allowed = "0 or more" if largest is None else f"0 to {largest}"
    if not isinstance(column, Tensor) or column.ndim != 1 or column.dtype != torch.int64:
        what = f"is {_kind(column)}"
    elif wrong := column[(column < 0) | (column > (column if largest is None else largest))].tolist():
        what = f"contains {wrong[0]}"
    else:
        return None
    return (
        f"its column {name!r} {what}, but the name is reserved for a counter, per-row torch.int64 [B] of {allowed}; "
        "rename the column"
    )


def _rank_of(plan: MicrobatchPlan, layout: ParallelLayout, row: int) -> int | None:
    """Return the rank that returned a row; None if the plan dropped it, or doesn't decide the rank.

    Background calls with fewer rows than data ranks go to all data ranks in turn (`WorkerGroup`).
    """
    if not plan.counts.sum(axis=1).all():
        return None
    ranks = enumerate(layout.output_ranks)
    return next((rank for dp_rank, rank in ranks if row in plan.rank_plan(dp_rank).rows), None)
