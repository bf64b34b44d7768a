"""`BatchedDataDict`: rows of a batch as named columns, which any number of roles can shard and put back in order.

What holds, and is tested in `tests/unit/data`:

1. all columns have the same number of rows, and every row has an id that no other row of the batch has;
2. `restore` of what ranks computed on `shard`'s containers gives the rows in the first order, whatever the plan,
   and whatever reorders, subsets or pickling lie between, as long as ids were carried along;
3. a shard's plan goes by row id: a subset leaves microbatches smaller, never fewer;
4. columns that lie elsewhere (`RemoteColumn`) can be all of it: only what reads tokens needs `fetch`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch import columns as whole
from rlpack.batch.errors import DataError, MissingColumnError
from rlpack.batch.fields import FIELDS, Column, Kind, describe
from rlpack.batch.microbatch_view import MicrobatchView
from rlpack.batch.ragged import Ragged, Rows, repeated, row_index
from rlpack.batch.remote import PayloadReader, RemoteColumn
from rlpack.batch.sharding import Spec, check_restored, layout_of, plan_by_batch_size, shortened
from rlpack.packing import MicrobatchPlan, RankPlan


class BatchedDataDict(MutableMapping[str, Any]):
    """A mapping from name to column, all of the same number of rows; one row is one sequence.

    A column is a tensor [B, ...], a `Ragged` with a run of tokens per row, or a list of Python objects; all but tensors
    [B] may be stored remotely (`RemoteColumn`). Columns of `rlpack.batch.fields` must have their declared kind
    and dtype.

    >>> batch = BatchedDataDict({"rewards": torch.tensor([0.5, 1.0]), "uid": ["a", "b"]})
    >>> batch.select([1])["uid"], batch.num_rows
    (['b'], 2)

    Args:
        columns: the columns by name.
        row_ids: distinct id of each row, int64 [B]; 0 to B - 1 when None. Results computed from a batch carry its
            ids (`row_ids=batch.row_ids`), so that `restore` can tell whose they are.

    Raises:
        DataError: a column is of no known kind, or has another number of rows; ids repeat or are no whole numbers.
    """

    plan: RankPlan | None
    has_given_ids: bool  # whether rows have ids of their own, or were numbered for want of any
    reader: PayloadReader | None  # gets remote columns as they are asked for; None leaves them. It is not pickled

    def __init__(self, columns: Mapping[str, Column], *, row_ids: Rows | None = None) -> None:
        self._columns: dict[str, Column] = {}
        self.plan = self.reader = None
        self.has_given_ids = row_ids is not None
        self._planned_ids = np.zeros(0, dtype=np.int64)
        if row_ids is None:
            first = next(iter(columns.values()), [])
            describe(first)
            self.row_ids = np.arange(len(first))
        else:
            self.row_ids = whole.distinct_ids(row_ids)
        for name, column in columns.items():
            self[name] = column

    def __getitem__(self, name: str) -> Any:
        self._check_has([name])
        column = self._columns[name]
        if isinstance(column, RemoteColumn) and self.reader is not None:
            column = self._columns[name] = column.resolve(self.reader)
        return column

    def __setitem__(self, name: str, column: Column) -> None:
        try:
            describe(column)
        except DataError as error:
            raise DataError(f"column {name!r}: {error}") from error
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
        return f"BatchedDataDict({self.num_rows} rows; {self._names()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (whole.as_sent(self._columns), self.row_ids, self.plan, self._planned_ids)

    def __copy__(self) -> "BatchedDataDict":
        return self.copy()

    @property
    def num_rows(self) -> int:
        """How many rows there are (B)."""
        return self.row_ids.size

    def names_of(self, kind: Kind) -> list[str]:
        """Return the names of all columns of a kind, wherever they lie: `per-token`, `per-row` or `list`."""
        return [name for name, column in self._columns.items() if describe(column)[0] == kind]

    def ragged(self, name: str) -> Ragged:
        """Return a column that has to be ragged."""
        column = self._here(name)
        if not isinstance(column, Ragged):
            raise DataError(f"column {name!r} is {describe(column)[0]}; a per-token (Ragged) column is needed")
        return column

    def dense(self, name: str) -> Tensor:
        """Return a column that has to be a tensor [B, ...]."""
        column = self._here(name)
        if not isinstance(column, Tensor):
            raise DataError(f"column {name!r} is {describe(column)[0]}; a per-row tensor is needed")
        return column

    def token_counts(self, lengths_from: str = "input_ids") -> Tensor:
        """Return the tokens of each row, int64 [B], on the CPU: what plans are made from."""
        lengths = whole.lengths_of(self._columns.get(lengths_from, []))
        return self.ragged(lengths_from).lengths if lengths is None else lengths.cpu()

    def padded(self, name: str, length: int | None = None) -> Tensor:
        """Return a ragged column as [B, L, ...], filled up with its field's padding (0 without one)."""
        return self.ragged(name).to_padded(FIELDS[name].padding if name in FIELDS else 0, length)

    def copy(self) -> "BatchedDataDict":
        """Return a container of its own, with lists and ids of its own, that shares tensors and plan."""
        return self._like(self._columns)

    def keep(self, names: Iterable[str]) -> "BatchedDataDict":
        """Return the batch with these columns only."""
        names = list(names)
        self._check_has(names)
        return self._like({name: self._columns[name] for name in names})

    def drop(self, names: Iterable[str]) -> "BatchedDataDict":
        """Return the batch without these columns."""
        gone = set(names)
        self._check_has(gone)
        return self._like({name: column for name, column in self._columns.items() if name not in gone})

    def rename(self, names: Mapping[str, str]) -> "BatchedDataDict":
        """Return the batch with columns renamed, `{old: new}`.

        Raises:
            DataError: an old name is missing, or two columns would have one name.
        """
        self._check_has(names)
        renamed = [names.get(name, name) for name in self._columns]
        twice = {name for name in renamed if renamed.count(name) > 1}
        if twice:
            raise DataError(f"renaming would make two columns {sorted(twice)}; the batch has {self._names()}")
        return self._like(dict(zip(renamed, self._columns.values(), strict=True)))

    def union(self, other: Mapping[str, Column]) -> "BatchedDataDict":
        """Return the columns of both; rows of another batch have to be the same ones in the same order.

        Raises:
            DataError: a column is in both, or rows differ.
        """
        twice = sorted(set(self._columns) & set(other))
        if twice:
            raise DataError(f"columns {twice} are in both batches; drop them in one, or assign them")
        if isinstance(other, BatchedDataDict):
            if other.num_rows != self.num_rows:
                raise DataError(f"{other!r} has {other.num_rows} rows and {self!r} has {self.num_rows}")
            if not np.array_equal(other.row_ids, self.row_ids):
                raise DataError("rows of the two batches differ or are in another order; restore() them first")
        return self._like({**self._columns, **other})

    def select(self, rows: Rows) -> "BatchedDataDict":
        """Return the rows at these positions (whole numbers or a mask [B]), in this order.

        Ids and plan stay with the rows, unless one comes twice: then all rows get new ids and the plan goes.
        """
        index = row_index(rows, self.num_rows)
        picked = whole.select(self._columns, index)
        if np.unique(index).size != index.size:
            return self._renewed(picked, index.size)
        return self._like(picked, self.row_ids[index])

    def split(self, sizes: Sequence[int]) -> list["BatchedDataDict"]:
        """Return consecutive parts of these sizes, as views.

        Raises:
            DataError: sizes don't add up to the number of rows.
        """
        if sum(sizes) != self.num_rows or any(size < 0 for size in sizes):
            raise DataError(f"sizes {list(sizes)} add up to {sum(sizes)}, and the batch has {self.num_rows} rows")
        ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
        return [self.select(np.arange(end - size, end)) for end, size in zip(ends, sizes, strict=True)]

    def repeat_interleave(self, n: int) -> "BatchedDataDict":
        """Return every row `n` times, copies side by side, with new ids.

        Raises:
            DataError: `n` is no whole number of at least 0.
        """
        return self._renewed(whole.select(self._columns, repeated(self.num_rows, n)), self.num_rows * n)

    @classmethod
    def concat(cls, batches: Sequence["BatchedDataDict"]) -> "BatchedDataDict":
        """Return the rows of all batches, one after the other.

        Ids stay when they differ, else all rows get new ones. A plan stays when all batches share it.

        Raises:
            DataError: there is no batch, or one lacks a column or has it in another kind or type.
        """
        if not batches:
            raise DataError("concat needs at least one batch")
        joined, ids = whole.join(batches), np.concatenate([batch.row_ids for batch in batches])
        if np.unique(ids).size != ids.size:
            return BatchedDataDict(joined, row_ids=np.arange(ids.size))
        first = batches[0]
        if all(batch.plan is first.plan for batch in batches):
            return first._like(joined, ids)
        return BatchedDataDict(joined, row_ids=ids)

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
        sequence_packing: Spec | None = None,
        dynamic_batching: Spec | None = None,
        lengths_from: str = "input_ids",
    ) -> list["BatchedDataDict"]:
        """Return one container per data-parallel rank, in which every `batch_size` rows are one optimizer step.

        Without packing and dynamic batching a rank's rows of a step are one microbatch; a batch that lacks
        `lengths_from` can be sharded that way too, its rows then count as empty.

        Args:
            shards: number of ranks.
            batch_size: rows of one optimizer step over all ranks; None takes all.
            sequence_packing: keys of the `batching` section, `mode` is packed.
            dynamic_batching: keys of the `batching` section, `mode` is dynamic.
            lengths_from: ragged column that token counts are taken from.

        Raises:
            DataError: both kinds of batching are asked for, or one in another mode.
        """
        planned = sequence_packing is not None or dynamic_batching is not None
        known = planned or lengths_from in self
        counts = self.token_counts(lengths_from).numpy() if known else np.zeros(self.num_rows, dtype=np.int64)
        plan = plan_by_batch_size(counts, shards, batch_size, sequence_packing, dynamic_batching)
        return self.shard(plan, lengths_from=lengths_from)

    def shard(self, plan: MicrobatchPlan, *, lengths_from: str = "input_ids") -> list["BatchedDataDict"]:
        """Return one container per rank of the plan: its rows in dispatch order, with the rank's plan attached.

        Rows that the plan drops are in none; in truncated ones, every column of the token counts is cut.

        Raises:
            DataError: the plan was made for other rows or other lengths.
        """
        if plan.num_rows != self.num_rows:
            raise DataError(f"the plan is for {plan.num_rows} rows and the batch has {self.num_rows}")
        counts = self.token_counts(lengths_from).numpy() if lengths_from in self else None
        return [self._shard(plan.rank_plan(rank), counts, lengths_from) for rank in range(plan.num_ranks)]

    def _shard(self, plan: RankPlan, counts: np.ndarray | None, lengths_from: str) -> "BatchedDataDict":
        """Return the rows of one rank."""
        cut = {} if counts is None else shortened(self._columns, plan, counts, lengths_from)
        rows = np.ascontiguousarray(plan.rows)
        picked = whole.gather(self._columns, rows, cut) if cut else whole.select(self._columns, rows)
        shard = BatchedDataDict(picked, row_ids=self.row_ids[rows])
        shard.plan, shard._planned_ids, shard.reader = plan, shard.row_ids, self.reader
        return shard

    @property
    def num_steps(self) -> int:
        """How many optimizer steps the attached plan has."""
        return self._attached().num_steps

    def microbatches(self, step: int = 0) -> Iterator[MicrobatchView]:
        """Yield what the model eats in optimizer step `step`, as the attached plan says.

        Their number does not depend on the rows that are still there: an emptied microbatch is a filler.

        Raises:
            DataError: no plan is attached.
        """
        plan = self._attached()
        for microbatch in plan.microbatches(step):
            index = whole.find(self.row_ids, self._planned_ids[microbatch.rows])
            present = index >= 0
            lengths = plan.lengths[microbatch.rows[present]]
            rows = self.select(index[present])
            rows.plan = None
            is_dummy = not present.any()
            yield MicrobatchView(rows, layout_of(plan.batching, lengths, microbatch.length), is_dummy, index[present])

    def restore(
        self,
        outputs: Sequence["BatchedDataDict"],
        *,
        plan: MicrobatchPlan | None = None,
        lengths_from: str = "input_ids",
    ) -> "BatchedDataDict":
        """Return the columns of the ranks' results, their rows in the order of this batch.

        Args:
            outputs: one container a rank, with the row ids of its shard; ranks without a row may lack columns.
            plan: needed where it dropped or truncated rows. Dropped rows come back as zeros (None in lists), and a
                ragged column whose lengths are the plan's is filled up with zeros to this batch's token counts.
            lengths_from: ragged column of this batch that token counts are taken from.

        Raises:
            DataError: a row is missing, comes twice or is not of this batch.
        """
        parts = [output for output in outputs if output.num_rows] or list(outputs[:1])
        if not parts:
            raise DataError("restore needs the results of at least one rank")
        ids = np.concatenate([part.row_ids for part in parts])
        positions = whole.find(self.row_ids, ids)
        check_restored(ids, positions, self.num_rows, plan)
        bounds = np.cumsum([part.num_rows for part in parts])[:-1]
        restored = whole.place(parts, np.split(positions, bounds), self.num_rows)
        if plan is not None and (len(plan.dropped) or len(plan.truncated)):
            counts, planned = self.token_counts(lengths_from), plan.lengths[positions]
            restored = {name: whole.fill(column, positions, planned, counts) for name, column in restored.items()}
        return self._like(restored)

    def _attached(self) -> RankPlan:
        if self.plan is None:
            raise DataError("no plan is attached; call shard(plan) or shard_by_batch_size first")
        return self.plan

    def _like(self, columns: Mapping[str, Column], row_ids: np.ndarray | None = None) -> "BatchedDataDict":
        """Return a batch of other columns with these rows' ids and plan."""
        batch = BatchedDataDict(columns, row_ids=self.row_ids if row_ids is None else row_ids)
        batch.plan, batch._planned_ids, batch.reader = self.plan, self._planned_ids, self.reader
        return batch

    def _renewed(self, columns: Mapping[str, Column], num_rows: int) -> "BatchedDataDict":
        """Return a batch of these rows' copies, with ids of its own and no plan."""
        batch = BatchedDataDict(columns, row_ids=np.arange(num_rows))
        batch.reader = self.reader
        return batch

    def _map_tensors(self, change: Callable[[Tensor | Ragged], Tensor | Ragged]) -> "BatchedDataDict":
        """Return the batch with other tensors; columns that lie elsewhere are fetched, or an error."""
        kept = {name: column for name, column in self.items() if isinstance(column, list)}
        return self._like({name: kept[name] if name in kept else change(self._here(name)) for name in self})

    def _here(self, name: str) -> Any:
        """Return a column that may not lie elsewhere."""
        if isinstance(column := self[name], RemoteColumn):
            raise DataError(f"column {name!r} is remote: {column}; fetch it first")
        return column

    def _check_has(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._columns:
                raise MissingColumnError(f"there is no column {name!r}; the batch has {self._names()}")

    def _names(self) -> str:
        return ", ".join(self._columns) or "no columns"


def _rebuild(sent: dict[str, Any], row_ids: np.ndarray, plan: RankPlan | None, planned: np.ndarray) -> BatchedDataDict:
    """Put a pickled batch together again."""
    batch = BatchedDataDict(whole.as_received(sent), row_ids=row_ids)
    batch.plan, batch._planned_ids = plan, planned
    return batch
