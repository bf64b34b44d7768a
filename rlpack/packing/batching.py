"""Batching: how one role turns its rows into microbatches.

`Batching` is both the `batching` section of the configuration and an argument of `make_plan`.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import MAX_LENGTH, UNLIMITED, align, check_count

Mode = Literal["packed", "dynamic", "fixed"]
Algorithm = Literal[
    "concatenative",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "best_fit_decreasing",
    "optimal",
]
Overlong = Literal["error", "truncate", "drop", "own_microbatch"]
Balance = Literal["cost", "tokens", "none"]

# A plan holds every microbatch of every rank, empty ones too: larger numbers are typos that would exhaust memory.
_MAX_MICROBATCHES = 2**20
_LIMITS = {"min_microbatches": _MAX_MICROBATCHES, "divisible_by": _MAX_MICROBATCHES}


@dataclass(frozen=True)
class Batching:
    """How rows become microbatches: the mode, the token budget and the alignments.

    Attributes:
        mode: `packed` puts whole sequences next to each other in one row; `dynamic` pads sequences of similar length
            to the longest; `fixed` pads `micro_batch_size` rows in arrival order.
        max_tokens: token budget, the most token slots of one microbatch on one rank, padding included.
            No budget (null) is allowed in `fixed` mode only.
        micro_batch_size: rows of a microbatch in `fixed` mode.
        algorithm: the packer of `packed` mode.
        pad_to_multiple: multiple that the slots of each packed sequence are rounded up to.
        length_multiple: multiple that the width of a `dynamic` or `fixed` microbatch is rounded up to.
        min_microbatches: minimum number of microbatches per rank and optimizer step.
        divisible_by: the number of microbatches per rank and optimizer step is made a multiple of this.
        overlong: what to do with a sequence over the budget: `error` raises, `truncate` cuts it, `drop` leaves it out,
            `own_microbatch` gives it a separate microbatch, which exceeds the budget.
        balance: what is balanced, both across the ranks and among the microbatches that run at the same time: `cost`
            (estimated compute) or `tokens` (token slots). `none` leaves the packer's microbatches in arrival order and
            gives each rank a contiguous run of them.
        equal_rows: first give each rank the same number of rows (some one fewer if the division has a remainder),
            balanced as in `balance`; each rank then forms its own microbatches.
        share_prompts: compute the prompt that several responses of a packed microbatch have in common once. The
            responses of a prompt stay together where ranks and budget allow.

    Raises:
        PackingError: a value is outside its limits.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    mode: Mode = "packed"
    max_tokens: int | None = 4096
    micro_batch_size: int = 16
    algorithm: Algorithm = "best_fit_decreasing"
    pad_to_multiple: int = 1
    length_multiple: int = 1
    min_microbatches: int = 1
    divisible_by: int = 1
    overlong: Overlong = "error"
    balance: Balance = "cost"
    equal_rows: bool = False
    share_prompts: bool = False

    def __post_init__(self) -> None:
        """Check every value against its limits."""
        choices_of = {"mode": Mode, "algorithm": Algorithm, "overlong": Overlong, "balance": Balance}
        for name, allowed in choices_of.items():
            value, choices = getattr(self, name), get_args(allowed)
            if not isinstance(value, str) or value not in choices:
                raise PackingError(f"batching.{name} is {value!r}; choose one of {', '.join(choices)}")
        switches = ("equal_rows", "share_prompts")
        for name in switches:
            if not isinstance(value := getattr(self, name), bool):
                raise PackingError(f"batching.{name} is {value!r}; set true or false")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in {*choices_of, *switches} or (field.name == "max_tokens" and value is None):
                continue
            count = check_count(value, f"batching.{field.name}", _LIMITS.get(field.name, MAX_LENGTH))
            object.__setattr__(self, field.name, count)  # a NumPy integer would overflow in sums of slots
        if self.max_tokens is None and self.mode != "fixed":
            raise PackingError(f"batching.max_tokens is not set; batching.mode={self.mode} needs a token budget")
        self._check_sharing()

    def _check_sharing(self) -> None:
        """Raise a `PackingError` if prompts can't be shared."""
        if not self.share_prompts:
            return
        if self.mode != "packed":
            raise PackingError(
                f"batching.share_prompts=true needs batching.mode=packed, and it is {self.mode}; set "
                "batching.share_prompts=false or batching.mode=packed"
            )
        if self.equal_rows:
            raise PackingError(
                "batching.share_prompts=true keeps the rows of a prompt together, so ranks can't have equally many "
                "rows; set batching.share_prompts or batching.equal_rows to false"
            )
        if self.pad_to_multiple > 1:
            raise PackingError(
                f"batching.share_prompts=true needs batching.pad_to_multiple=1, and it is {self.pad_to_multiple}: "
                "sequences that share a prompt can't be aligned one by one; set batching.share_prompts=false or "
                "batching.pad_to_multiple=1"
            )

    @property
    def budget(self) -> int:
        """Token slots that a microbatch may take; `UNLIMITED` without a token budget."""
        return UNLIMITED if self.max_tokens is None else self.max_tokens

    @property
    def alignment(self) -> int:
        """Multiple that slots are rounded up to, and the padded length of a dummy microbatch."""
        return self.pad_to_multiple if self.mode == "packed" else self.length_multiple

    @property
    def divides_rows_first(self) -> bool:
        """Whether rows are divided among ranks before microbatches are formed."""
        return self.mode == "fixed" or self.equal_rows

    def slots_of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the slots of each row, int64 [B]: its aligned length, in padded modes at least one alignment."""
        slots = align(lengths, self.alignment)
        return slots if self.mode == "packed" else np.maximum(slots, self.alignment)

    def override(self, **changes: Any) -> "Batching":
        """Return a copy with the values of `changes` that are not None.

        >>> Batching(max_tokens=64).override(mode="dynamic", max_tokens=None).max_tokens
        64
        """
        return replace(self, **{name: value for name, value in changes.items() if value is not None})
