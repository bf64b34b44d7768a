"""The request: the arguments of `make_plan`, checked.

Everything after `check_request` relies on these checks and repeats none of them.
"""

from dataclasses import dataclass, replace

import numpy as np

from rlpack.packing.analysis.cost import Cost
from rlpack.packing.batching import Batching
from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import Integers, align, check_count, check_integers, check_lengths, check_seed
from rlpack.packing.prefixes import sharing_groups

# A plan holds every microbatch of every rank, empty ones too: larger numbers are typos that would exhaust memory.
MAX_RANKS, _MAX_MICROBATCHES = 2**20, 2**26


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The checked arguments of `make_plan`.

    Attributes:
        lengths: tokens of each row as given, int64 [B].
        batching: the mode, the token budget and the alignments.
        dp_size: number of data-parallel ranks.
        mini_batch_size: rows of an optimizer step; None for all.
        groups: group of each row, int64 [B], or None; with prefixes and `split_groups`, the parts of groups that stay
            together.
        prefixes: tokens at the start of each row that all rows of its prompt have in common, int64 [B], or None.
        prompts: group of each row as given, int64 [B]; None without prefixes.
        split_groups: whether a group may be split.
        cost: cost model of a row; None for its slots.
        seed: seed of `first_fit_shuffle`.
    """

    lengths: np.ndarray
    batching: Batching
    dp_size: int
    mini_batch_size: int | None = None
    groups: np.ndarray | None = None
    prefixes: np.ndarray | None = None
    prompts: np.ndarray | None = None
    split_groups: bool = False
    cost: Cost | None = None
    seed: int = 0

    @property
    def rows_per_step(self) -> int:
        """Rows of a full optimizer step."""
        return self.mini_batch_size or max(1, self.lengths.size)

    @property
    def balanced_cost(self) -> Cost | None:
        """Cost model by which rows are balanced; None for their slots."""
        return self.cost if self.batching.balance == "cost" else None

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps; the last may hold fewer rows."""
        return -(-self.lengths.size // self.rows_per_step)

    @property
    def step_of_row(self) -> np.ndarray:
        """Optimizer step of each row, int64 [B]."""
        return np.arange(self.lengths.size) // self.rows_per_step


def check_request(  # noqa: PLR0913 - the arguments of `make_plan`
    lengths: Integers,
    batching: Batching,
    *,
    dp_size: int,
    mini_batch_size: int | None = None,
    groups: Integers | None = None,
    split_groups: bool = False,
    prefixes: Integers | None = None,
    cost: Cost | None = None,
    seed: int = 0,
) -> PlanRequest:
    """Return the arguments of `make_plan` as a request.

    Raises:
        PackingError: an argument has the wrong type or is outside its limits.
    """
    if not isinstance(batching, Batching):
        raise PackingError(f"batching is a {type(batching).__name__}; give a Batching")
    if cost is not None and not isinstance(cost, Cost):
        raise PackingError(f"cost is a {type(cost).__name__}; give a Cost, or None to count slots")
    checked = check_lengths(lengths)
    ids = None if groups is None else check_integers(groups, "group")
    if ids is not None and ids.size != checked.size:
        raise PackingError(f"groups has {ids.size} entries for {checked.size} rows; give one per row")
    request = PlanRequest(
        lengths=checked,
        batching=batching,
        dp_size=check_count(dp_size, "dp_size", MAX_RANKS),
        mini_batch_size=None if mini_batch_size is None else check_count(mini_batch_size, "mini_batch_size"),
        groups=ids,
        split_groups=split_groups,
        cost=cost,
        seed=check_seed(seed),
    )
    _check_size(request)
    return request if prefixes is None else _with_prefixes(request, prefixes)


def _with_prefixes(request: PlanRequest, prefixes: Integers) -> PlanRequest:
    """Return the request with prefixes that rows share.

    Raises:
        PackingError: they are longer than their rows, or can't be shared.
    """
    checked, lengths = check_lengths(prefixes, "prefix"), request.lengths
    groups, batching = request.groups, request.batching
    if groups is None:
        raise PackingError("prefixes are shared within groups; give groups, too")
    if not batching.share_prompts:
        raise PackingError("batching.share_prompts is false; set it to share prefixes")
    if checked.size != lengths.size:
        raise PackingError(f"prefixes has {checked.size} entries for {lengths.size} rows; give one per row")
    if (longer := np.flatnonzero(checked > lengths)).size:
        row = int(longer[0])
        raise PackingError(f"prefix of row {row} is {checked[row]}; the row has {lengths[row]} tokens")
    parts = groups
    if request.split_groups:
        fewest = request.dp_size * max(batching.min_microbatches, batching.divisible_by)
        parts = sharing_groups(groups, rows_per_step=request.rows_per_step, num_microbatches=fewest)
    return replace(request, groups=parts, prefixes=checked, prompts=groups)


def _check_size(request: PlanRequest) -> None:
    """Raise a `PackingError` if the plan would hold too many microbatches."""
    batching = request.batching
    fewest = int(align(np.array(batching.min_microbatches), batching.divisible_by))
    total = request.dp_size * fewest * request.num_steps
    if total > _MAX_MICROBATCHES:
        raise PackingError(
            f"dp_size is {request.dp_size} with at least {fewest} microbatches per rank in each of "
            f"{request.num_steps} optimizer steps: {total} in total, over the limit of {_MAX_MICROBATCHES}; lower "
            "batching.min_microbatches or batching.divisible_by, or raise the mini-batch size"
        )
