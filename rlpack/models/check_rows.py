"""The rows that the checks of a model run: random, in the layouts and sizes of a run where that is affordable."""

from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.config.layout_remedies import Change, remedy
from rlpack.config.roles import batching_key, forward_batching, longest_known_row, role_batching, role_parallel
from rlpack.config.schema import Config
from rlpack.models.length_thresholds import MAX_MASK_LENGTH, length_thresholds, longest_row, selections
from rlpack.models.rope import frequency_limits
from rlpack.packing.lengths import UNLIMITED

# Eager attention over longer rows takes too much memory; the masks of longer windows are still compared.
_MAX_LENGTH = 512
# Uneven, and none a multiple of another.
_LENGTHS = (23, 37, 11)

# A full microbatch has this many short rows, cycling through these lengths, and rows up to this length.
_SHORT_ROWS, _SHORT_LENGTHS, _MAX_FULL_LENGTH = 300, (2, 1, 3, 2, 4), 1024
# Recurrent layers without their kernels take a Python step for each token.
_MAX_RECURRENT_LENGTH = 64
# Slots of a full microbatch where the run's are not known, and the fewest that are checked.
_DEFAULT_SLOTS, _LEAST_SLOTS = 1024, 96
# Rows whose gradients are compared: these for a large model, else those of `draw_rows` and this many short ones.
_FEW_LENGTHS, _SHORT_GRADIENT_ROWS = (3, 7, 3, 3, 7, 3), 40
# Limit on weights × slots of a full microbatch, so that its four forward passes take about a second.
_WORK = {"cpu": 6e9, "cuda": 1e13}


@dataclass(frozen=True)
class RowLimits:
    """Upper limits on the microbatches of a run; None if not known.

    Attributes:
        longest: tokens of the longest row.
        slots: token slots of a microbatch, padding included.
        rows: rows of a microbatch.
        keys: the configuration keys that bound `longest`, for errors.
        padding: the overrides with which rows are padded instead of packed, for errors; None for the mode of the role's
            batching alone, "" if none are known.
    """

    longest: int | None = None
    slots: int | None = None
    rows: int | None = None
    keys: str = "the longest row"
    padding: str | None = None

    @classmethod
    def of_role(cls, config: Config, role: str) -> "RowLimits":
        """Return the limits of a role's microbatches, including those of its passes without gradients."""
        batching, forward = role_batching(config, role), forward_batching(config, role)
        longest, keys = longest_known_row(config), "data.max_prompt_tokens + rollout.max_new_tokens"
        slots = None if batching.budget == UNLIMITED else batching.budget
        rows = batching.micro_batch_size if batching.mode == "fixed" else None
        if slots is not None and batching.overlong != "own_microbatch" and slots < (longest or UNLIMITED):
            longest, keys = slots, f"{batching_key(role)}.max_tokens"
        if forward is not None:
            slots = None if slots is None or forward.budget == UNLIMITED else max(slots, forward.budget)
            rows = None if rows is None else max(rows, forward.micro_batch_size)
        return cls(longest, slots, rows, keys, _padding(config, role))

    def way_to_pad(self, role: str) -> str:
        """Return the overrides with which a role's rows are padded, for errors; "" if none are known."""
        return _padded_modes(role) if self.padding is None else self.padding


def _padding(config: Config, role: str) -> str | None:
    """Return the overrides with which a role's rows are padded, if ranks share its tokens: they pack them in any mode.

    None if ranks don't share them; "" if no such overrides pass the rules.
    """
    parallel = role_parallel(config, role)
    shared: Change = {name: 1 for name, size in (("cp", parallel.cp), ("tp", parallel.tp)) if size > 1}
    if not shared:
        return None
    sizes = remedy(config, role, [shared])
    if sizes is None:
        return ""
    return f"{sizes} {_padded_modes(role)}" if role_batching(config, role).mode == "packed" else sizes


def _padded_modes(role: str) -> str:
    """Return the modes of batching that pad rows, as an override."""
    return f"{batching_key(role)}.mode=dynamic or fixed"


def draw_rows(model: PreTrainedModel, vocab_size: int, *, seed: int, longest: int | None = None) -> list[Tensor]:
    """Return three rows of random tokens, int64 [L], two past the model's length thresholds if affordable.

    Args:
        model: the model whose length thresholds and positions are used.
        vocab_size: tokens are drawn below it.
        seed: random seed for the tokens.
        longest: tokens of the longest row of the run; None if not known.
    """
    return random_rows(three_lengths(model, longest), vocab_size, seed=seed)


def three_lengths(model: PreTrainedModel, longest: int | None) -> list[int]:
    """Return the lengths of `draw_rows`."""
    limit = max(4, min(longest_row(model), longest or MAX_MASK_LENGTH))
    most = _MAX_LENGTH if longest is None else min(_MAX_LENGTH, max(longest, max(_LENGTHS)))
    most = min([most, *(limit for _, limit in frequency_limits(model.config))])
    threshold = max((size for size in length_thresholds(model) if size + 12 <= most), default=0)
    lengths = (max(_LENGTHS[0], threshold + 5), max(_LENGTHS[1], threshold + 12), _LENGTHS[2])
    return [min(length, limit) for length in lengths]


def random_rows(lengths: list[int], vocab_size: int, *, seed: int) -> list[Tensor]:
    """Return rows of random tokens below `vocab_size`, int64 [L] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def full_microbatches(model: PreTrainedModel, limits: RowLimits, *, packed: bool) -> list[list[int]]:
    """Return the lengths of the rows of full microbatches: many short rows, and long ones that fill the slots.

    Packed, one microbatch has both; padded, where all rows are as wide as the longest, each has its own. Large models
    get fewer slots than the run has.

    Args:
        model: the model, whose size, positions and windows are used.
        limits: limits on the run's microbatches.
        packed: whether the rows are packed.
    """
    slots = min(limits.slots or _DEFAULT_SLOTS, affordable_slots(model) // (1 if packed else 2))
    longest = _longest_full_row(model, limits)
    if not packed:
        return [
            _lengths_in_turn(_SHORT_LENGTHS, slots // 4, limits, longest),
            _lengths_in_turn(_uneven(longest), slots // longest, limits, longest),
        ]
    lengths, short, long = [], cycle(_SHORT_LENGTHS), cycle(_uneven(longest))
    while len(lengths) < _SHORT_ROWS and sum(lengths) < slots // 2:
        lengths.append(min(next(short), longest))
    while (rest := slots - sum(lengths)) > 0:
        lengths.append(min(next(long), rest))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    return [[lengths[index] for index in order.tolist()]]


def gradient_rows(model: PreTrainedModel, limits: RowLimits) -> list[int]:
    """Return the lengths of the rows whose gradients are compared.

    Each length costs a backward pass, which takes time even for few tokens. A large model therefore gets only two.
    """
    lengths = three_lengths(model, limits.longest)
    short = [length for length, _ in zip(cycle(_SHORT_LENGTHS), range(_SHORT_GRADIENT_ROWS), strict=False)]
    lengths = short[:20] + lengths + short[20:]
    if sum(lengths) > affordable_slots(model) // 4:
        lengths = [min(length, max(lengths)) for length in _FEW_LENGTHS]
    return lengths[: max(3, limits.rows or len(lengths))]


def affordable_slots(model: PreTrainedModel) -> int:
    """Return the slots that a model of this size runs forward in a fraction of a second."""
    weights = sum(weight.numel() for weight in model.parameters())
    return max(_LEAST_SLOTS, int(_WORK["cuda" if model.device.type == "cuda" else "cpu"] / max(1, weights)))


def _longest_full_row(model: PreTrainedModel, limits: RowLimits) -> int:
    """Return the tokens of the longest row of a full microbatch."""
    most = min(limits.longest or _MAX_FULL_LENGTH, longest_row(model), _MAX_FULL_LENGTH)
    # Several rows fit, and rows longer than these change their rotary frequencies by design.
    limits_of_ropes = [limit for _, limit in frequency_limits(model.config)]
    most = min([most, affordable_slots(model) // 3, (limits.slots or _DEFAULT_SLOTS) // 2, *limits_of_ropes])
    if model._is_stateful:
        most = min(most, _MAX_RECURRENT_LENGTH)
    if selections(model):  # of many keys two can be equally good, and rounding selects one
        most = min(most, max(three_lengths(model, limits.longest)))
    return max(4, most)


def _lengths_in_turn(lengths: tuple[int, ...], num_rows: int, limits: RowLimits, longest: int) -> list[int]:
    """Return the lengths of padded rows, at least two of them."""
    num_rows = max(2, min(num_rows, _SHORT_ROWS, limits.rows or _SHORT_ROWS))
    return [min(length, longest) for _, length in zip(range(num_rows), cycle(lengths), strict=False)]


def _uneven(longest: int) -> tuple[int, ...]:
    """Return a few lengths up to `longest`; only a few, because rows of equal length share a reference pass."""
    return longest, longest * 2 // 3, longest // 2
