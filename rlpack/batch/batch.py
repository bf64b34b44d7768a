"""`BatchedDataDict`: named columns that roles shard by a plan and restore in order.

Invariants (tests/unit/batch):

1. All columns have the same number of rows, and row ids are distinct.
2. `restore` of the results that ranks computed on `shard`'s batches has the original row order, for any plan and after
   any reordering, subset or pickling, as long as row ids were carried along.
3. A shard's plan refers to row ids: selecting a subset makes microbatches smaller, never fewer.
4. Any column except a tensor [B] can be remote (`RemoteColumn`). Only operations that read tokens need a `reader`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch import columns as column_ops
from rlpack.batch import sharding
from rlpack.batch.errors import DataError, MissingColumnError
from rlpack.batch.fields import FIELDS, Column, Kind, check_kind, describe
from rlpack.batch.ragged import Ragged, Rows, repeat_positions, row_index
from rlpack.batch.remote import PayloadReader, RemoteColumn
from rlpack.packing import MicrobatchPlan, RankPlan
from rlpack.packing.analysis.layouts import Layout


class BatchedDataDict(MutableMapping[str, Any]):
    """A mapping from names to columns; one row is one sequence.

    A column is a tensor [B, ...], a `Ragged` with a run of tokens per row, or a list of Python objects; all but tensors
    [B] may be stored remotely (`RemoteColumn`). Columns of `rlpack.batch.fields` have the kind and dtype given there.

    >>> batch = BatchedDataDict({"rewards": torch.tensor([0.5, 1.0]), "uid": ["a", "b"]})
    >>> batch.select([1])["uid"], batch.num_rows
    (['b'], 2)

    Args:
        columns: the columns by name.
        row_ids: distinct id of each row, int64 [B]; 0 to B - 1 when None. Results computed from a batch carry its
            ids (`row_ids=batch.row_ids`), so that `restore` can match them to its rows.

    Raises:
        DataError: a column has an unknown kind or a different number of rows; ids repeat or are not integers.
    """

    plan: RankPlan | None  # the rank's plan, on a shard
    has_explicit_ids: bool  # whether `row_ids` was passed; repeated rows get ids that nobody passed
    origin: bytes  # of the batch that numbered the rows, in this process or another; selections of rows keep it
    reader: PayloadReader | None  # fetches remote columns on first access; None leaves them remote. Not pickled

    def __init__(self, columns: Mapping[str, Column], *, row_ids: Rows | None = None) -> None:
        self._columns: dict[str, Column] = {}
        self.plan = self.reader = None
        self.has_explicit_ids, self.origin = row_ids is not None, os.urandom(8)
        self._planned_ids = np.zeros(0, dtype=np.int64)
        self.row_ids = column_ops.row_numbers(columns) if row_ids is None else column_ops.distinct_ids(row_ids)
        for name, column in columns.items():
            self[name] = column

    def __getitem__(self, name: str) -> Any:
        self._check_has([name])
        column = self._columns[name]
        if isinstance(column, RemoteColumn) and self.reader is not None:
            column = self._columns[name] = column.resolve(self.reader)
        return column

    def __setitem__(self, name: str, column: Column) -> None:
        check_kind(name, column)
        if len(column) != self.num_rows:
            raise DataError(f"column {name!r} has {len(column)} rows and the batch has {self.num_rows}")
        if name in FIELDS:
            FIELDS[name].check(column)
        self._columns[name] = list(column) if isinstance(column, list) else column

    def __delitem__(self, name: str) -> None:
        self._check_has([name])
        del self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of columns, as mappings do; `num_rows` counts rows."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"BatchedDataDict({self.num_rows} rows; {', '.join(self._columns) or 'no columns'})"

    def __reduce__(self) -> tuple[Any, ...]:
        columns = column_ops.to_picklable(self._columns)
        return _rebuild, (columns, self.row_ids, self.plan, self._planned_ids, self.has_explicit_ids, self.origin)

    def __copy__(self) -> "BatchedDataDict":
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchedDataDict":
        return self._like(column_ops.deep_copy(self._columns, memo))  # shares the plan and the reader

    @property
    def num_rows(self) -> int:
        """Return the number of rows (B)."""
        return self.row_ids.size

    def names_of(self, kind: Kind) -> list[str]:
        """Return the names of all columns of a kind, including remote ones: `per-token`, `per-row` or `list`."""
        return [name for name, column in self._columns.items() if describe(column)[0] == kind]

    def ragged(self, name: str) -> Ragged:
        """Return a column, which must be ragged."""
        column = self._local(name)
        if not isinstance(column, Ragged):
            raise DataError(f"column {name!r} is {describe(column)[0]}; it must be per-token (Ragged)")
        return column

    def dense(self, name: str) -> Tensor:
        """Return a column, which must be a tensor [B, ...]."""
        column = self._local(name)
        if not isinstance(column, Tensor):
            raise DataError(f"column {name!r} is {describe(column)[0]}; it must be a per-row tensor")
        return column

    def token_counts(self, lengths_from: str = "input_ids") -> Tensor:
        """Return the number of tokens in each row, int64 [B], on the CPU; plans are based on these counts."""
        lengths = column_ops.lengths_of(self._columns.get(lengths_from, []))
        return self.ragged(lengths_from).lengths if lengths is None else lengths.cpu()

    def padded(self, name: str, length: int | None = None) -> Tensor:
        """Return a ragged column as [B, L, ...], padded with its field's value (0 without one)."""
        return self.ragged(name).to_padded(FIELDS[name].padding if name in FIELDS else 0, length)

    def copy(self) -> "BatchedDataDict":
        """Return a shallow copy: lists and row ids are copied; tensors and the plan are shared."""
        return self._like(self._columns)

    def keep(self, names: Iterable[str]) -> "BatchedDataDict":
        """Return the batch with only these columns."""
        names = list(names)
        self._check_has(names)
        return self._like({name: self._columns[name] for name in names})

    def drop(self, names: Iterable[str]) -> "BatchedDataDict":
        """Return the batch without these columns."""
        dropped = set(names)
        self._check_has(dropped)
        return self._like({name: column for name, column in self._columns.items() if name not in dropped})

    def rename(self, names: Mapping[str, str]) -> "BatchedDataDict":
        """Return the batch with columns renamed, `{old: new}`.

        Raises:
            DataError: an old name is missing, or two columns would have one name.
        """
        self._check_has(names)
        return self._like(column_ops.rename(self._columns, names))

    def union(self, other: Mapping[str, Column]) -> "BatchedDataDict":
        """Return the columns of both, which must have the same rows in the same order.

        Raises:
            DataError: a column is in both, or rows differ.
        """
        columns = column_ops.union(self._columns, other)
        if isinstance(other, BatchedDataDict):
            if other.num_rows != self.num_rows:
                raise DataError(f"{other!r} has {other.num_rows} rows and {self!r} has {self.num_rows}")
            if not np.array_equal(other.row_ids, self.row_ids):
                raise DataError("rows of the two batches differ or are in another order; restore() them first")
        return self._like(columns)

    def select(self, rows: Rows) -> "BatchedDataDict":
        """Return the rows at these positions (integers or a mask [B]), in this order.

        Rows keep their ids and plan. If a row is selected twice, all rows get new ids, which belong to no shard, and no
        plan. Columns of consecutive rows share memory with the batch: don't write to the result in place.
        """
        index = row_index(rows, self.num_rows)
        if np.unique(index).size != index.size:
            return self._renumbered(index)
        return self._like(column_ops.select(self._columns, index), self.row_ids[index])

    def split(self, sizes: Sequence[int]) -> list["BatchedDataDict"]:
        """Return consecutive parts of these sizes, as views.

        Raises:
            DataError: sizes don't add up to the number of rows.
        """
        return [self.select(rows) for rows in column_ops.consecutive_rows(sizes, self.num_rows)]

    def repeat_interleave(self, n: int) -> "BatchedDataDict":
        """Repeat every row `n` times, copies next to each other, with new ids as if `select` had repeated a row.

        Raises:
            DataError: `n` is not a non-negative integer.
        """
        return self._renumbered(repeat_positions(self.num_rows, n))

    @classmethod
    def concat(cls, batches: Sequence["BatchedDataDict"]) -> "BatchedDataDict":
        """Return the rows of all batches, one after the other.

        Rows keep their ids if all are distinct, else all rows get new ones. The plan is kept if all batches share it.

        Raises:
            DataError: `batches` is empty, or a column is missing from one of them or differs in kind or dtype.
        """
        if not batches:
            raise DataError("concat needs at least one batch")
        joined, ids = column_ops.join(batches), np.concatenate([batch.row_ids for batch in batches])
        is_distinct, first = np.unique(ids).size == ids.size, batches[0]
        new_ids = column_ops.ids_of_repeats(ids.size, of_shard=any(batch.plan is not None for batch in batches))
        result = BatchedDataDict(joined, row_ids=ids if is_distinct else new_ids)
        if is_distinct and all(batch.plan is first.plan for batch in batches):
            result = first._like(joined, ids)
        own = [batch for batch in batches if batch.num_rows] or batches[:1]  # the others have no ids
        result.origin = own[0].origin if is_distinct and len({one.origin for one in own}) == 1 else os.urandom(8)
        result.has_explicit_ids = is_distinct and all(batch.has_explicit_ids for batch in own)
        return result

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "BatchedDataDict":
        """Return the batch with its tensors on `device`."""
        return self._map_tensors(lambda column: column.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "BatchedDataDict":
        """Return the batch with its tensors in page-locked memory."""
        return self._map_tensors(lambda column: column.pin_memory())

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        *,
        sequence_packing: sharding.Spec | None = None,
        dynamic_batching: sharding.Spec | None = None,
        lengths_from: str = "input_ids",
    ) -> list["BatchedDataDict"]:
        """Return one batch per rank; every `batch_size` rows are one optimizer step.

        If neither packing nor dynamic batching is requested, a rank's rows of a step are one microbatch. Only then may
        the column `lengths_from` be missing; all rows count as empty if it is.

        Args:
            shards: number of ranks.
            batch_size: rows of one optimizer step over all ranks; None takes all.
            sequence_packing: keys of the `batching` section, with mode=packed.
            dynamic_batching: keys of the `batching` section, with mode=dynamic.
            lengths_from: ragged column that gives the token counts.

        Raises:
            DataError: both kinds of batching are set, or one has another mode.
        """
        needs_lengths = sequence_packing is not None or dynamic_batching is not None or lengths_from in self
        counts = self.token_counts(lengths_from).numpy() if needs_lengths else np.zeros(self.num_rows, dtype=np.int64)
        plan = sharding.plan_by_batch_size(counts, shards, batch_size, sequence_packing, dynamic_batching)
        return self.shard(plan, lengths_from=lengths_from)

    def shard(
        self, plan: MicrobatchPlan, *, lengths_from: str = "input_ids", ranks: Sequence[int] | None = None
    ) -> list["BatchedDataDict"]:
        """Return one batch per data rank, or per one of `ranks`: its rows in dispatch order, its plan attached.

        Dropped rows are in no shard. In truncated rows, every ragged column with the lengths of `lengths_from` is cut.
        Without that column, lengths aren't checked. As with `select`, don't write to the columns in place.

        Raises:
            DataError: the plan was made for other rows or other lengths.
            MissingColumnError: the plan truncates rows, and there is no column `lengths_from`.
        """
        counts = self.token_counts(lengths_from).numpy() if lengths_from in self else None
        sharding.check_plan(plan, self.num_rows, counts, lengths_from)
        ranks = range(plan.num_ranks) if ranks is None else ranks
        return [self._shard(plan.rank_plan(rank), counts, lengths_from) for rank in ranks]

    def _shard(self, plan: RankPlan, counts: np.ndarray | None, lengths_from: str) -> "BatchedDataDict":
        """Return the rows of one rank."""
        lengths = {} if counts is None else sharding.truncated_lengths(self._columns, plan, counts, lengths_from)
        rows = np.ascontiguousarray(plan.rows)
        shard = BatchedDataDict(column_ops.gather(self._columns, rows, lengths), row_ids=self.row_ids[rows])
        shard.plan, shard._planned_ids, shard.reader = plan, shard.row_ids, self.reader
        return shard

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps of the attached plan."""
        return self._attached().num_steps

    def microbatches(self, step: int = 0) -> Iterator["MicrobatchView"]:
        """Yield the microbatches of optimizer step `step` of the attached plan.

        The number of microbatches does not depend on which rows are still present: one without rows is a dummy.

        Raises:
            DataError: no plan is attached.
        """
        plan = self._attached()
        positions = column_ops.positions_of(self.row_ids, self._planned_ids)
        for microbatch in plan.microbatches(step):
            index = positions[microbatch.rows]
            present = index >= 0
            rows = self.select(index[present])
            rows.plan, rows._planned_ids = None, np.zeros(0, dtype=np.int64)  # pickling them would pickle the shard's
            layout = sharding.layout_of(plan, microbatch.rows[present], microbatch.length)
            yield MicrobatchView(rows, layout, not present.any(), index[present])

    def restore(
        self,
        outputs: Sequence["BatchedDataDict"],
        *,
        plan: MicrobatchPlan | None = None,
        lengths_from: str = "input_ids",
    ) -> "BatchedDataDict":
        """Return the columns of the ranks' results, with rows in the order of this batch.

        Args:
            outputs: one batch per rank, made with the row ids of its shard (`shard.keep([]).union(...)`, or
                `row_ids=`); ranks without rows may lack columns.
            plan: needed if it dropped or truncated rows. Dropped rows are restored as zeros (None in lists), and a
                ragged column with the plan's lengths is zero-padded to this batch's token counts.
            lengths_from: ragged column of this batch that gives the token counts.

        Raises:
            DataError: a row is missing, occurs twice, is not from this batch, or has an id that nobody passed.
        """
        sharding.check_results([r.has_explicit_ids or r.origin == self.origin or not r.num_rows for r in outputs])
        parts = [output for output in outputs if output.num_rows] or list(outputs[:1])
        positions = sharding.restored_positions(self.row_ids, [part.row_ids for part in parts], plan)
        columns = column_ops.place_rows(parts, positions, self.num_rows)
        if plan is not None and (len(plan.dropped) or len(plan.truncated)):
            columns = sharding.pad_truncated(columns, plan, np.concatenate(positions), self.token_counts(lengths_from))
        return self._like(columns)

    def _attached(self) -> RankPlan:
        if self.plan is None:
            raise DataError("no plan is attached; call shard(plan) or shard_by_batch_size first")
        return self.plan

    def _like(self, columns: Mapping[str, Column], row_ids: np.ndarray | None = None) -> "BatchedDataDict":
        """Return a batch of `columns` with the plan, reader and (by default) ids of this one."""
        batch = BatchedDataDict(columns, row_ids=self.row_ids if row_ids is None else row_ids)
        batch.plan, batch._planned_ids, batch.reader = self.plan, self._planned_ids, self.reader
        batch.has_explicit_ids, batch.origin = self.has_explicit_ids, self.origin
        return batch

    def _renumbered(self, index: np.ndarray) -> "BatchedDataDict":
        """Return the rows at these positions without a plan and with new ids, which belong to no shard."""
        ids = column_ops.ids_of_repeats(index.size, of_shard=self.plan is not None)
        batch = BatchedDataDict(column_ops.select(self._columns, index), row_ids=ids)
        batch.reader, batch.has_explicit_ids = self.reader, False
        return batch

    def _map_tensors(self, change: Callable[[Tensor | Ragged], Tensor | Ragged]) -> "BatchedDataDict":
        """Return the batch with `change` applied to its tensors, fetching remote columns."""
        lists = {name: column for name, column in self.items() if isinstance(column, list)}
        return self._like({name: lists[name] if name in lists else change(self._local(name)) for name in self})

    def _local(self, name: str) -> Any:
        """Return a column, which must not be remote."""
        if isinstance(column := self[name], RemoteColumn):
            raise DataError(f"column {name!r} is remote: {column}; fetch it first")
        return column

    def _check_has(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._columns:
                raise MissingColumnError(
                    f"there is no column {name!r}; the batch has {', '.join(self._columns) or 'no columns'}"
                )


def _rebuild(
    columns: dict[str, Any], row_ids: np.ndarray, plan: RankPlan | None, planned_ids: np.ndarray, *origin: Any
) -> BatchedDataDict:
    """Rebuild a pickled batch."""
    batch = BatchedDataDict(column_ops.from_picklable(columns), row_ids=row_ids)
    batch.plan, batch._planned_ids, (batch.has_explicit_ids, batch.origin) = plan, planned_ids, origin
    return batch


@dataclass(frozen=True)
class MicrobatchView:
    """The rows of one forward and backward pass, and the layout of their tokens.

    Attributes:
        rows: the microbatch's rows; a dummy has none. Consecutive rows share memory with the shard; don't write to them
            in place.
        layout: slots, positions and segment bounds of the rows' tokens, in row order.
        is_dummy: whether it takes part in the forward and backward pass with zero weight, to keep ranks in lock step.
        index: positions of `rows` in the shard, int64 [n].
    """

    rows: BatchedDataDict
    layout: Layout
    is_dummy: bool
    index: np.ndarray
