"""Check that dividing a model's rows, weights, experts or layers among ranks leaves its outputs unchanged.

The reference is the undivided model: whole on each rank, or sharded over all ranks by FSDP alone, which divides no
computation (`score_undivided`).
"""

import copy
import gc
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlpack.config.sections.compute import Offload
from rlpack.models.check_outputs import max_difference, scale, score_together, tolerance
from rlpack.models.check_rows import draw_rows
from rlpack.models.checks import has_experts
from rlpack.models.errors import ModelError
from rlpack.models.new_model import NewModel
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from rlpack.models.stored_model import StoredModel

# Model types whose outputs and gradients are tested to be equal on every layout, in tests/distributed/layouts.
TESTED_FAMILIES = frozenset(
    {"deepseek_v3", "gemma2", "gemma3_text", "llama", "mistral", "mixtral", "qwen3", "qwen3_moe"},
)
_SEED = 20240609
# Rounding may decide a tie between two experts differently, but ties don't occur in every draw.
_ROUTED_DRAWS = 3
# Outputs of each row of each draw.
Scores = list[list[Tensor]]


@torch.no_grad()
def score_whole_rows(model: PackedModel, device: torch.device | str, vocab_size: int, *, packed: bool = True) -> Scores:
    """Return the outputs of a few rows, before ranks share them; a collective if the model is sharded."""
    draws = _ROUTED_DRAWS if has_experts(model.uncut.model) else 1
    rows = [draw_rows(model.model, vocab_size, seed=_SEED + draw) for draw in range(draws)]
    return [score_together(model.eval(), each, device, packed=packed) for each in rows]


def score_undivided(
    model: PackedModel,
    in_parts: StoredModel | NewModel,
    mesh: DeviceMesh,
    device: torch.device,
    vocab_size: int,
    *,
    packed: bool,
    offload: Offload,
) -> Scores:
    """Return `score_whole_rows` of a copy of the model, in fp32 and sharded by FSDP alone; a collective.

    The copy is freed before this returns, so a rank never holds more than its part of one model.

    Args:
        model: on the meta device, not sharded or divided yet.
        in_parts: the source of its weights.
        mesh: all ranks, one dimension.
        device: the model's device.
        vocab_size: tokens are drawn below it.
        packed: whether the role packs rows into one, or pads them.
        offload: as for `shard_model`.
    """
    undivided, language_model = copy.deepcopy((model, in_parts.model))
    shard_model(undivided, mesh, offload=offload)
    weights_device = "cpu" if offload == "parameters" else device
    replace(in_parts, model=language_model).materialize(undivided, device, weights_device)
    if isinstance(undivided, Policy):
        undivided.measure_outputs()
    scores = score_whole_rows(undivided, device, vocab_size, packed=packed)
    del undivided, language_model
    gc.collect()  # FSDP's units refer to each other
    return scores


@torch.no_grad()
def check_split(
    model: PackedModel,
    whole: Scores,
    device: torch.device | str,
    vocab_size: int,
    *,
    role: str,
    packed: bool = True,
) -> None:
    """Raise unless a divided model has the same outputs as the undivided one; a collective.

    Args:
        model: with `split` set if ranks share its rows, `weight_split`, `expert_split` or `stage` if they share its
            weights, experts or layers.
        whole: the result of `score_whole_rows` or `score_undivided`.
        device: the model's device.
        vocab_size: as for `score_whole_rows`.
        role: the model's role, for the error.
        packed: as for `score_whole_rows`.

    Raises:
        ModelError: outputs differ, for example because a layer other than attention reads several tokens.
    """
    splits = {
        "cp": model.split and model.split.group,
        "tp": model.weight_split,
        "ep": model.expert_split,
        "pp": model.stage,
    }
    names = [name for name, split in splits.items() if split]
    found = score_whole_rows(model, device, vocab_size, packed=packed)
    draws = [_largest_gap(*scores) for scores in zip(found, whole, strict=True)]
    gap, row = min(draws, key=lambda draw: float("inf") if draw[0] != draw[0] else draw[0])
    allowed = tolerance(model)
    if not gap <= allowed:
        raise ModelError(
            f"{type(model.model).__name__} as the {role}: row {row} differs by {gap:.2e} if ranks share it (at most "
            f"{allowed:.0e}); set " + " ".join(f"{role}.parallel.{name}=1" for name in names)
        )


def _largest_gap(found: list[Tensor], expected: list[Tensor]) -> tuple[float, int]:
    """Return the largest relative difference of a row's outputs, NaN if any is, and the row."""
    gaps = [
        (max_difference(*outputs) / scale(outputs[1]), row)
        for row, outputs in enumerate(zip(found, expected, strict=True))
    ]
    return max(gaps, key=lambda pair: float("inf") if pair[0] != pair[0] else pair[0])
