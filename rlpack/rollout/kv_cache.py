"""A key-value cache in buffers with room for more tokens.

transformers' `DynamicCache` copies the whole cache for each token; here only the token is copied. Buffers grow by half
of what they hold, so a high limit on new tokens costs no memory before it is reached.

Invariants (tests/unit/rollout/test_kv_cache.py):

1. layers return what transformers' layers return, bit for bit, after any updates and selections of rows;
2. a buffer has room for at most 1.5 times the tokens it holds, plus `_LEAST_ROOM`, and never for more than the limit.

Shape letters: R running rows, H key-value heads, L tokens, D entries of a head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from rlpack.rollout.errors import EngineError

# Kinds of layers in which a token sees all tokens before it, or those of a window.
_WINDOW_KINDS = frozenset({"full_attention", "sliding_attention"})
# Tokens of room in a new buffer; growing it more often would cost more than this memory.
_LEAST_ROOM = 32


class BufferedLayer(CacheLayerMixin):
    """Keys and values of one attention layer; a layer with a window drops those before it.

    Attributes:
        window: tokens that a token sees, itself included; None for all.
        keys: keys that the next token will attend to, [R, H, L, D]; a view of the buffer.
        values: likewise.
    """

    def __init__(self, limit: int, window: int | None = None) -> None:
        """Keep at most `limit` tokens; a token sees the last `window`, itself included, or all if it is None."""
        super().__init__()
        self.is_sliding = window is not None
        self._limit, self.window = limit, window
        self._seen = 0  # tokens that the layer was given
        self._start, self._end = 0, 0  # the kept tokens' range in the buffers
        self._buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with an empty cache of these rows."""
        self._buffers = key_states[:, :, :0], value_states[:, :, :0]
        self.keys, self.values = self._buffers
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [R, H, n, D]; return all that the n tokens may see."""
        if self._buffers is None:
            # A prompt's. Rows are often selected before the next token, so room is made then.
            self._buffers = key_states, value_states
            self._seen = self._end = key_states.shape[-2]
        else:
            self._append(key_states, value_states)
        visible = self._kept()
        if self.window is not None:
            self._start = max(self._start, self._end - self.window + 1)
        self.keys, self.values = visible if self.window is None else self._kept()
        self.is_initialized = True
        return visible

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self._seen

    def get_max_length(self) -> int:
        """Return the window; -1 without one."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens the next `query_length` may see, and the place of the first."""
        kept = self._end - self._start
        return kept + query_length, self._seen - kept

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the rows by copies of these, int64 [R]; they may repeat."""
        if self._buffers is not None:
            self._reallocate(0, indices)

    def move_rows(self, sources: Tensor, targets: Tensor, num_rows: int) -> None:
        """Copy rows over others, in place, and drop those from `num_rows` on.

        Args:
            sources: rows that are copied, int64 [n].
            targets: where they go, int64 [n], all different.
            num_rows: rows that remain.
        """
        if self._buffers is None:
            return
        for buffer in self._buffers:
            kept = buffer[:, :, self._start : self._end]
            kept[targets] = kept[sources]
        self._buffers = self._buffers[0][:num_rows], self._buffers[1][:num_rows]
        self.keys, self.values = self._kept()

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        assert self._buffers is not None
        count = key_states.shape[-2]
        if self._end + count > self._buffers[0].shape[-2]:
            self._reallocate(count)
        self._buffers[0][:, :, self._end : self._end + count] = key_states
        self._buffers[1][:, :, self._end : self._end + count] = value_states
        self._seen += count
        self._end += count

    def _kept(self) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        keys, values = self._buffers
        return keys[:, :, self._start : self._end], values[:, :, self._start : self._end]

    def _reallocate(self, count: int, rows: Tensor | None = None) -> None:
        """Copy the remaining keys and values to buffers with room for at least `count` more tokens."""
        needed = self._end - self._start + count
        size = max(needed, min(needed + max(_LEAST_ROOM, needed // 2), self._limit))
        self._buffers = _with_room(self._kept(), size, rows)
        self._start, self._end = 0, self._end - self._start
        self.keys, self.values = self._kept()


class BufferedCache(DynamicCache):
    """transformers' dynamic cache of a model, with buffered layers for full and sliding-window attention."""

    def __init__(self, model: PreTrainedModel, limit: int) -> None:
        """Make a cache for rows of at most `limit` tokens; it takes no memory before the first."""
        super().__init__(config=model.config)
        self.layers = [_buffered(layer, limit) for layer in self.layers]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows`, int64 [R], each once; few copies if most rows keep their places."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        sources = rows[moved]
        for layer in self.layers:
            if isinstance(layer, BufferedLayer):
                layer.move_rows(sources, moved, len(rows))
            else:
                layer.batch_select_indices(rows)


def mask_windows(model: PreTrainedModel, cache: BufferedCache) -> dict[str, int | None]:
    """Return the window of each kind of attention layer, None without one; a token sees the whole window.

    Raises:
        EngineError: a layer's mask depends on more than a window, such as on chunks.
    """
    settings = model.config.get_text_config(decoder=True).to_dict()
    default = "chunked_attention" if settings.get("attention_chunk_size") else "full_attention"
    kinds = settings.get("layer_types") or [default] * len(cache.layers)
    windows = {}
    for kind, layer in zip(kinds, cache.layers, strict=True):
        if kind not in _WINDOW_KINDS or not isinstance(layer, BufferedLayer):
            raise EngineError(f"layers of kind {kind} need the model's own masks")
        if windows.setdefault(kind, layer.window) != layer.window:
            raise EngineError(f"layers of kind {kind} have several windows")
    return windows


def _buffered(layer: Any, limit: int) -> Any:
    """Return a buffered layer in place of a transformers layer that concatenates; other layers unchanged."""
    if type(layer) is DynamicLayer:
        return BufferedLayer(limit)
    if type(layer) is DynamicSlidingWindowLayer:
        return BufferedLayer(limit, layer.sliding_window)
    return layer


def _with_room(states: tuple[Tensor, Tensor], size: int, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Copy keys and values, or `rows` of them, into new buffers of `size` tokens."""
    buffers = []
    for old in states:
        num_rows = old.shape[0] if rows is None else len(rows)
        buffer = old.new_empty(num_rows, old.shape[1], size, old.shape[3])
        buffer[:, :, : old.shape[2]] = old if rows is None else old[rows]
        buffers.append(buffer)
    return buffers[0], buffers[1]
