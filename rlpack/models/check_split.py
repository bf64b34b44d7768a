"""Check that a model whose rows, weights or layers ranks share has the outputs that it has whole."""

import torch
from torch import Tensor

from rlpack.models.check_outputs import TOLERANCE, max_difference, scale, score_together
from rlpack.models.check_rows import draw_rows
from rlpack.models.errors import ModelError
from rlpack.models.packed import PackedModel

_SEED = 20240609


@torch.no_grad()
def score_whole_rows(model: PackedModel, device: torch.device | str, vocab_size: int) -> list[Tensor]:
    """Return the outputs of a few packed rows, before ranks share them; a collective if the model is sharded."""
    rows = draw_rows(model.model, vocab_size, seed=_SEED)
    return score_together(model.eval(), rows, device, packed=True)


@torch.no_grad()
def check_split(
    model: PackedModel, whole: list[Tensor], device: torch.device | str, vocab_size: int, *, role: str
) -> None:
    """Raise unless a model has the outputs that it had before ranks shared it; a collective.

    Args:
        model: with `split` set if ranks share its rows, `weight_split`, `expert_split` or `stage` if they share its
            weights, experts or layers.
        whole: what `score_whole_rows` returned.
        device: the model's device.
        vocab_size: as of `score_whole_rows`.
        role: the model's role, for the error.

    Raises:
        ModelError: outputs differ, because a layer other than attention reads several tokens, for example.
    """
    splits = {
        "cp": model.split and model.split.group,
        "tp": model.weight_split,
        "ep": model.expert_split,
        "pp": model.stage,
    }
    names = [name for name, split in splits.items() if split]
    for index, (found, expected) in enumerate(zip(score_whole_rows(model, device, vocab_size), whole, strict=True)):
        gap = max_difference(found, expected) / scale(expected)
        if not gap <= TOLERANCE[model.compute_dtype]:
            raise ModelError(
                f"{type(model.model).__name__} as the {role}: row {index} differs by {gap:.2e} if ranks share "
                f"it (at most {TOLERANCE[model.compute_dtype]:.0e}); set "
                + " ".join(f"{role}.parallel.{name}=1" for name in names)
            )
