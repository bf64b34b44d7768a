"""The table of columns with a fixed meaning: their kind, dtype and padding value.

Entry t of a per-token column describes token t: `logprobs[t] = log p(token_t | tokens before t)`, which is 0 and
masked at t = 0. Masks come from what was sampled, never from token values. Columns outside the table may have any kind
and dtype. A remote column (`rlpack.batch.remote.RemoteColumn`) has the kind and dtype of the column it refers to.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn

Kind = Literal["per-token", "per-row", "list"]
Column = torch.Tensor | Ragged | list | RemoteColumn


@dataclass(frozen=True)
class Field:
    """One column of the table.

    Attributes:
        name: key in a `BatchedDataDict`.
        kind: `per-token` is a `Ragged`, `per-row` a tensor [B], `list` a list of Python objects.
        dtype: dtype of the values; None for a list.
        padding: value of padded slots; token ids use the model's pad token instead.
        or_per_row: a per-token column may also be a tensor [B], one value for all tokens of a row.
        is_name: entries of the list are short names, which are never offloaded.
    """

    name: str
    kind: Kind
    dtype: torch.dtype | None
    padding: float = 0
    or_per_row: bool = False
    is_name: bool = False

    def check(self, column: Column) -> None:
        """Raise a `DataError` unless `column` has this field's kind and dtype."""
        kind, dtype = describe(column)
        is_kind = kind == self.kind or (self.or_per_row and kind == "per-row")
        if not is_kind or dtype != self.dtype:
            required = f"{self.kind} {self.dtype}" if self.dtype else self.kind
            raise DataError(f"column {self.name!r} is {kind} {dtype or ''}; rlpack.batch.fields requires {required}")
        if isinstance(column, torch.Tensor) and column.ndim != 1:
            raise DataError(
                f"column {self.name!r} is {list(column.shape)}; it must be [B], one value per row (rlpack.batch.fields)"
            )


def describe(column: Column) -> tuple[Kind, torch.dtype | None]:
    """Return a column's kind and dtype.

    >>> describe(torch.zeros(2))
    ('per-row', torch.float32)

    Raises:
        DataError: it has none of the three kinds.
    """
    if isinstance(column, RemoteColumn):
        return describe(column.empty)
    if isinstance(column, Ragged):
        return "per-token", column.values.dtype
    if isinstance(column, torch.Tensor) and column.ndim >= 1:
        return "per-row", column.dtype
    if isinstance(column, list):
        return "list", None
    raise DataError(f"a column is a tensor [B, ...], a Ragged or a list, not a {type(column).__name__}")


def check_kind(name: str, column: Column) -> None:
    """Raise a `DataError` that names the column unless it has one of the three kinds."""
    try:
        describe(column)
    except DataError as error:
        raise DataError(f"column {name!r}: {error}") from error


_TABLE = (
    Field("input_ids", "per-token", torch.int64),
    Field("response_mask", "per-token", torch.bool),
    Field("rollout_logprobs", "per-token", torch.float32),
    Field("logprobs", "per-token", torch.float32),
    Field("reference_logprobs", "per-token", torch.float32),
    Field("advantages", "per-token", torch.float32, or_per_row=True),
    Field("values", "per-token", torch.float32),
    Field("returns", "per-token", torch.float32),
    Field("loss_weight", "per-row", torch.float32),
    Field("token_weight", "per-row", torch.float32),
    Field("response_lengths", "per-row", torch.int64),
    Field("response_tokens", "per-row", torch.int64),
    Field("value_tokens", "per-row", torch.int64),
    Field("kl_sum", "per-row", torch.float64),
    Field("greedy_rewards", "per-row", torch.float32),
    Field("logprob_sum", "per-row", torch.float64),
    Field("logprob_gap", "per-row", torch.float64),
    Field("prompt_lengths", "per-row", torch.int64),
    Field("group_ids", "per-row", torch.int64),
    Field("policy_version", "per-token", torch.int32, padding=-1),
    Field("oldest_version", "per-row", torch.int32),
    Field("version_counts", "per-token", torch.int32),
    Field("seeds", "per-row", torch.int64),
    Field("rewards", "per-row", torch.float32),
    Field("quarantined", "per-row", torch.bool),
    Field("valid", "per-row", torch.bool),
    Field("trains", "per-row", torch.bool),
    Field("completion", "list", None),
    Field("finish_reason", "list", None, is_name=True),
    Field("engine_failure", "list", None, is_name=True),
    Field("engine_has_failed", "per-row", torch.bool),
    Field("engine_version", "per-row", torch.int64),
    Field("uid", "list", None, is_name=True),
)
FIELDS = {field.name: field for field in _TABLE}
