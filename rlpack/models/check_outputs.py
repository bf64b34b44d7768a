"""The quantities that model checks compare: outputs of rows together, outputs of rows alone, and their differences.

Letters: T tokens, R rows, L tokens of a row, d hidden size.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from rlpack.models.inputs import ModelInputs, pack_rows, pad_rows
from rlpack.models.own_attention import REFERENCE, attention_implementation
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard

# Allowed rounding differences from the outputs of other kernels, or of the same on parts of rows, relative to the
# largest output; a leak, a lost mask or a wrong position is orders of magnitude larger.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
# Limits on rows that are scored alone at a time: their tokens, each with its logits, and entries of their attention.
_MAX_TOKENS, _MAX_ATTENTION = 512, 2**20


def score_together(model: PackedModel, rows: list[Tensor], device: torch.device | str, *, packed: bool) -> list[Tensor]:
    """Return the probe of each row, [L] or [L, d], computed together."""
    outputs = _same(model, model.probe(lay_out(rows, packed=packed).to(device))).cpu()
    _free_output_layer(model)
    return list(outputs.split([row.shape[0] for row in rows]))


def score_alone(model: PackedModel, rows: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return the outputs of each row, [L] or [L, d], under transformers' eager attention.

    Rows of equal length run together, without packing or padding.
    """
    scored: dict[int, Tensor] = {}
    with attention_implementation(model.model, REFERENCE):
        for indices in equal_groups(rows):
            outputs = model.probe_wrapped_model(torch.stack([rows[index] for index in indices]).to(device))
            scored |= zip(indices, _same(model, outputs).cpu(), strict=True)
            _free_output_layer(model)
    return [scored[index] for index in range(len(rows))]


def _free_output_layer(model: PackedModel) -> None:
    """Free the output layer's gathered weights, which would otherwise stay allocated during the next forward pass."""
    if model.reshard_after_forward:
        reshard(model)


def _same(model: PackedModel, outputs: Tensor) -> Tensor:
    """Return outputs that are bit-identical on every rank, so that all ranks reach the same decision."""
    return outputs if model.expert_split is None else model.expert_split.same(outputs)


def equal_groups(rows: list[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of rows of equal length, in groups small enough to take little memory."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_length[row.shape[0]].append(index)
    for length, indices in by_length.items():
        size = max(1, min(_MAX_TOKENS // max(1, length), _MAX_ATTENTION // max(1, length**2)))
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


def lay_out(rows: list[Tensor], *, packed: bool) -> ModelInputs:
    """Return the rows packed into one, or padded to the longest."""
    return pack_rows(rows) if packed else pad_rows(rows)


def layout_name(packed: bool) -> str:
    """Return the name of the layout for errors."""
    return "packed" if packed else "padded"


def tolerance(model: PackedModel) -> float:
    """Return the allowed difference from transformers' own forward pass, in units of `scale`."""
    return TOLERANCE[model.compute_dtype] * depth_factor(model)


def depth_factor(model: PackedModel) -> float:
    """Return the factor by which rounding errors grow over layers, at least 1.

    They add up: 1e-6 after 2 layers, 2e-5 after 48 with large random weights, in fp32.
    """
    layers = model.model.config.get_text_config().to_dict().get("num_hidden_layers") or 1
    return max(1.0, layers / 8)


def scale(outputs: Tensor) -> float:
    """Return the unit of differences: the largest log-prob [T] or entry of hidden states [T, d], at least 1.

    Rounding grows with the logits, and so with the largest log-prob.
    """
    return max(1.0, outputs.abs().max().item())


def max_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference; NaN if any is NaN."""
    return (left.double() - right.double()).abs().max().item() if left.numel() else 0.0


def median_difference(left: Tensor, right: Tensor) -> float:
    """Return the median over tokens of the largest absolute difference of each."""
    gaps = (left.double() - right.double()).abs()
    return (gaps if gaps.ndim == 1 else gaps.amax(1)).median().item()
