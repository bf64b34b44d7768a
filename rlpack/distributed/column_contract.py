"""Which columns a sharded method reads and returns, declared at the method.

Only the columns that a method reads are sent to its ranks, so callers pass whole batches. Errors name the role, the
method, the column, and a method that returns it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import MissingColumnError

# Stands for every list column of a batch: texts, and other columns of the dataset.
TEXT_COLUMNS = "(text columns)"
# The columns that a method reads, or a function from its other arguments to them.
Reads = Sequence[str] | Callable[..., Sequence[str]]
# Methods (`role.method`) that return a column, by column.
Producers = Mapping[str, Sequence[str]]


def as_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns; a string is one name, and a sequence of letters to Python.

    >>> as_names("rewards"), as_names(["uid", "rewards"])
    (('rewards',), ('uid', 'rewards'))
    """
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class ColumnContract:
    """The columns of a sharded method.

    Attributes:
        reads: columns that the batch must have; None if not declared, which sends all columns.
        optional: columns that are sent, too, if the batch has them.
        returns: columns that the result must have; None allows any.
    """

    reads: Reads | None = None
    optional: tuple[str, ...] = ()
    returns: tuple[str, ...] | None = None

    def overriding(self, other: "ColumnContract") -> "ColumnContract":
        """Return the contract of a method that overrides one with the contract `other`.

        Declared `reads` replace those of `other` and its `optional` columns. Without them, both are inherited, and the
        method's own `optional` columns are added.
        """
        returns = other.returns if self.returns is None else self.returns
        if self.reads is not None:
            return ColumnContract(self.reads, self.optional, returns)
        return ColumnContract(other.reads, (*other.optional, *self.optional), returns)

    def columns_to_send(
        self, batch: BatchedDataDict, args: Sequence[Any], kwargs: Mapping[str, Any], *, call: str, producers: Producers
    ) -> list[str]:
        """Return the columns of a batch that a call reads.

        Args:
            batch: first argument of the call.
            args: its other positional arguments.
            kwargs: its keyword arguments.
            call: `role.method`, for messages.
            producers: what returns which column, for messages.

        Raises:
            MissingColumnError: the batch lacks a column that the call reads.
        """
        if self.reads is None:
            return list(batch)
        reads = self.reads(*args, **kwargs) if callable(self.reads) else self.reads
        names: list[str] = []
        for name in as_names(reads):
            if name == TEXT_COLUMNS:
                names += batch.names_of("list")
            elif name not in batch:
                raise MissingColumnError(_missing(call, name, list(batch), producers))
            else:
                names.append(name)
        return list(dict.fromkeys([*names, *(name for name in self.optional if name in batch)]))

    def missing_from(self, result: Mapping[str, Any]) -> list[str]:
        """Return the columns that a result lacks."""
        return [name for name in self.returns or () if name not in result]


def producers_of(contracts: Mapping[str, ColumnContract]) -> dict[str, list[str]]:
    """Return which methods return each column, from contracts by `role.method`.

    >>> producers_of({"rollout.generate": ColumnContract(returns=("input_ids", "response_mask"))})
    {'input_ids': ['rollout.generate'], 'response_mask': ['rollout.generate']}
    """
    producers: dict[str, list[str]] = {}
    for call, contract in contracts.items():
        for name in contract.returns or ():
            producers.setdefault(name, []).append(call)
    return producers


def _missing(call: str, name: str, columns: list[str], producers: Producers) -> str:
    made_by = f"; {name!r} is returned by {' and '.join(producers[name])}" if name in producers else ""
    nearest = get_close_matches(name, columns, n=1)
    meant = f" (did you mean {nearest[0]!r}?)" if nearest and not made_by else ""
    remedy = made_by or "; correct reads= of the method's decorator, or pass a batch that has the column"
    return (
        f"{call} reads the column {name!r}{meant}, and the batch has only {', '.join(columns) or 'no columns'}{remedy}"
    )
