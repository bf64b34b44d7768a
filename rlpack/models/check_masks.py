"""Check of masks: those that transformers builds for each layer equal those that packed attention applies."""

import torch
from torch import Tensor

from rlpack.models.attention_masks import causal_mask
from rlpack.models.check_rows import RowLimits
from rlpack.models.errors import ModelError
from rlpack.models.length_thresholds import MAX_MASK_LENGTH, position_limit, windows
from rlpack.models.own_attention import LayerMask, layer_masks
from rlpack.models.packed import PackedModel, language_model

# Masks of rows up to this length are compared entry by entry; in longer ones around multiples of each window.
_MAX_WHOLE_LENGTH = 1024


def check_masks(
    model: PackedModel, vocab_size: int, device: torch.device | str, limits: RowLimits, *, role: str
) -> None:
    """Raise if a layer's mask under transformers differs from the one that packed attention applies.

    Rows as long as the model's longest window are too long to run attention on here, but not to compare masks.

    Args:
        model: on `device`, sharded or not.
        vocab_size: tokens are drawn below it.
        device: the model's device.
        limits: limits of the run; a window longer than its longest row has no effect.
        role: the model's role, for the error.

    Raises:
        ModelError: the masks differ, or can't be compared at the lengths of the run's rows.
    """
    sizes = windows(model.model)
    if not sizes:
        return
    longest = min(limits.longest or 3 * max(sizes), position_limit(model.model) or 3 * max(sizes))
    past = min(longest, max(sizes) + 8)
    length = min(past, _MAX_WHOLE_LENGTH)
    pad = limits.way_to_pad(role)
    way_out = f"keep rows shorter ({limits.keys})" + (f", or set {pad}" if pad else "")
    masks = _masks_of_row(model, length, vocab_size, device)
    _check_whole(masks, length, way_out)
    if past <= length:
        return
    # A row whose mask the model builds itself doesn't show which mask a longer row would get.
    built = any(mask.rule is None and mask.allowed is not None for mask in masks)
    if model.worst_of_stages(float(built), "")[0]:
        length = min(past, MAX_MASK_LENGTH)
        _check_whole(_masks_of_row(model, length, vocab_size, device), length, way_out)
        if past > length:
            raise ModelError(
                f"the masks of rows over {length} tokens can't be compared with those of packed attention, and rows "
                f"have up to {longest} tokens; {way_out}"
            )
    _check_far(masks, _positions(sizes, longest).to(device), way_out)


def _masks_of_row(model: PackedModel, length: int, vocab_size: int, device: torch.device | str) -> list[LayerMask]:
    """Return the mask of each attention layer for a row of `length` tokens."""
    row = torch.arange(length, device=device) % vocab_size
    base = language_model(model.model)
    return layer_masks(model.model, lambda: model.run(lambda: base(input_ids=row[None], use_cache=False)))


def _check_whole(masks: list[LayerMask], length: int, way_out: str) -> None:
    """Compare all entries of a row's masks."""
    for mask in masks:
        if mask.allowed is None:
            continue
        expected = causal_mask(length, mask.window, mask.allowed.device)
        if not torch.equal(mask.allowed, expected):
            query = int((mask.allowed != expected).any(1).nonzero()[0])
            raise ModelError(
                f"{mask.layer} masks a row of {length} tokens differently from packed attention, first at "
                f"token {query} (transformers lets it see {int(mask.allowed[query].sum())} tokens, packed attention "
                f"{int(expected[query].sum())}); {way_out}"
            )


def _check_far(masks: list[LayerMask], positions: Tensor, way_out: str) -> None:
    """Compare the entries at `positions`, int64 [P], by calling the functions that define the masks."""
    behind = positions[:, None] - positions
    for mask in masks:
        if mask.rule is None:
            continue
        expected = (behind >= 0) if mask.window is None else (behind >= 0) & (behind < mask.window)
        wrong = mask.allows(positions, positions) != expected
        if wrong.any():
            query, key = wrong.nonzero()[0].tolist()
            sees = ("sees", "doesn't see") if not expected[query, key] else ("doesn't see", "sees")
            raise ModelError(
                f"{mask.layer} masks rows over {int(positions[query])} tokens differently from packed attention: "
                f"token {int(positions[query])} {sees[0]} token {int(positions[key])} in transformers and "
                f"{sees[1]} it packed; {way_out}"
            )


def _positions(sizes: list[int], longest: int) -> Tensor:
    """Return positions around the multiples of each window, and the ends of the row, int64 [P]."""
    near = {0, 1, longest - 1}
    for size in sizes:
        near |= {multiple * size + offset for multiple in (1, 2, 3) for offset in range(-2, 3)}
    return torch.tensor(sorted(position for position in near if 0 <= position < longest))
