"""A decoder that runs known layers itself, without the modules of transformers.

With a small model, a token spends more time in Python (modules, arguments, masks and cache classes) than in matrix
products. Prompts run through the model itself, which fills the cache; each later token takes only a few PyTorch calls
per layer.

Shape letters: R running rows, M rows of products (R and padding), A attention heads, H key-value heads, G = A / H,
L tokens, D entries of a head.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.batch.ragged import Ragged
from rlpack.rollout.decoders import PreparedMaskDecoder
from rlpack.rollout.errors import EngineError
from rlpack.rollout.fused_linear import FusedLinear, padded_rows
from rlpack.rollout.known_layers import KnownLayer, Norm, read_known, unknown_part

# Weights up to this size are copied in the layout of fast products; larger models use their own.
_MAX_COPY_BYTES = 2**30


class _Layer(NamedTuple):
    """A layer with prepared products.

    Attributes:
        known: its norms and settings.
        head_norm: norm of queries and keys, with weights [A + H, D]; None without.
    """

    known: KnownLayer
    qkv: FusedLinear
    output: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    head_norm: Norm | None


class DirectDecoder(PreparedMaskDecoder):
    """`PreparedMaskDecoder` whose steps run the layers of a known model in plain PyTorch.

    An instance copies weights when it is made, so it must not outlive an update of the model.
    """

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        """Prepare the weights; see `Decoder`.

        Raises:
            EngineError: the model has an unknown part.
        """
        if reason := unknown_part(model):
            raise EngineError(reason)
        self._known = read_known(model)
        super().__init__(model, prompts, limit, pad_token_id)
        copy = sum(weight.numel() * weight.element_size() for weight in model.parameters()) <= _MAX_COPY_BYTES
        self._layers = [_prepared(layer, self._known.heads, copy) for layer in self._known.layers]
        self._head = FusedLinear([self._known.head], copy=copy)
        products = [self._head, *(product for layer in self._layers for product in layer[1:5])]
        self._least_rows = min((product.least_rows for product in products if product.least_rows), default=None)
        self._rotations = self._rotation_tables(limit)

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; see `Decoder`."""
        self._width += 1
        known, rows = self._known, len(tokens)
        padding = padded_rows(rows, self._least_rows) - rows
        masks = {kind: mask.flatten(0, 1) for kind, mask in self._step_masks().items()}
        positions = self._positions.squeeze(1)
        rotations = {kind: table.index_select(0, positions).unbind(1) for kind, table in self._rotations.items()}
        states = F.embedding(F.pad(tokens, (0, padding)) if padding else tokens, known.embedding)
        if known.embedding_scale != 1:
            states = states * known.embedding_scale
        for layer, cache in zip(self._layers, self._cache.layers, strict=True):
            kind = layer.known.kind
            attended = self._attend(layer, cache, states, rotations[kind], masks[kind])
            attended = layer.output(F.pad(attended, (0, 0, 0, padding)) if padding else attended)
            if layer.known.after_attention is not None:
                attended = layer.known.after_attention(attended)
            states = states + attended
            gate, up = layer.gate_up(layer.known.before_mlp(states)).chunk(2, -1)
            added = layer.down(known.activation(gate).mul_(up))
            states = states + (added if layer.known.after_mlp is None else layer.known.after_mlp(added))
        self._positions += 1
        return self._head(known.norm(states))[:rows]

    def _attend(self, layer: _Layer, cache: Any, states: Tensor, rotation: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """Return attention's output, [R, A·D], for the newest column.

        Args:
            layer: the layer.
            cache: its keys and values; those of the column are appended.
            states: the layer's input, [M, hidden size].
            rotation: cos and sin of the rows' positions, [R, 1, D]; sin with the signs of `_rotation_tables`.
            mask: additive, [R·H, 1, L].
        """
        known, (cos, sin) = self._known, rotation
        rows, heads, size = len(cos), known.heads, known.head_size
        projected = layer.qkv(layer.known.before_attention(states))[:rows].view(rows, -1, size)
        rotated = projected[:, : heads + known.key_value_heads]
        if layer.head_norm is not None:
            rotated = layer.head_norm(rotated)
        rotated = torch.addcmul(rotated * cos, rotated.roll(size // 2, -1), sin)
        keys, values = cache.update(rotated[:, heads:, None], projected[:, heads + known.key_value_heads :, None])
        queries = rotated[:, :heads].reshape(rows * known.key_value_heads, -1, size)
        keys, values = torch.flatten(keys, 0, 1), torch.flatten(values, 0, 1)
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=layer.known.scaling)
        return torch.bmm(scores.softmax(-1), values).view(rows, heads * size)

    def _additive_mask(self) -> Tensor:
        """Return a mask with an entry for each key-value head, [R, H, 1, columns]."""
        return super()._additive_mask().repeat(1, self._known.key_value_heads, 1, 1)

    def _rotation_tables(self, limit: int) -> dict[str, Tensor]:
        """Return, for each kind of layer and each position, [2, 1, D]: cos, and sin with the signs of a rotation.

        A rotation is x·cos plus the other half of each head times sin, negated for the first half.
        """
        longest = int(self._prompts.lengths.max()) + limit
        positions = torch.arange(longest, device=self._prompts.lengths.device)[None]
        tables = {}
        for kind in self._windows:
            cos, sin = self._known.rotate(positions, kind)
            half = self._known.head_size // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            tables[kind] = torch.stack((cos[0], signed[0]), 1)[:, :, None]
        return tables


def _prepared(layer: KnownLayer, heads: int, copy: bool) -> _Layer:
    """Prepare a layer's products."""
    head_norm = None
    if layer.q_norm is not None and layer.k_norm is not None:
        if layer.q_norm.eps != layer.k_norm.eps:
            raise EngineError("norms of queries and keys have different eps")
        size = len(layer.k_norm.weight)
        key_heads = layer.qkv[1].out_features // size
        weights = torch.stack([layer.q_norm.weight] * heads + [layer.k_norm.weight] * key_heads)
        head_norm = Norm(weights, layer.q_norm.eps)
    return _Layer(
        known=layer,
        qkv=FusedLinear(layer.qkv, copy=copy),
        output=FusedLinear([layer.output], copy=copy),
        gate_up=FusedLinear(layer.gate_up, copy=copy),
        down=FusedLinear([layer.down], copy=copy),
        head_norm=head_norm,
    )
