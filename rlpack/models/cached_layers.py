"""What each layer of a model caches of a row while it generates, from the model's config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlpack.models.text_settings import settings_of_layer

_WINDOWED = "sliding_attention"
# Kinds of layers (`layer_types`) that certainly cache keys and values.
_CERTAIN = ("full_attention", "indexed_attention", _WINDOWED)
# Settings of models whose layers differ in kind, but have no `layer_types`.
_MIXED = ("layers_block_type", "block_types", "attn_layer_period", "attn_layer_indices")
# Models with `kv_lora_rank` that cache the keys and values of all heads.
_UNCOMPRESSED = ("minicpm3",)


@dataclass(frozen=True)
class CachedLayer:
    """What a layer caches of each token.

    Attributes:
        heads: heads of keys and values, which are divided among GPUs; 0 if each GPU has the whole layer.
        numbers: numbers per head, or of all heads if `heads` is 0.
        window: number of a row's last tokens that a token attends to; None for all.
        is_certain: whether every engine caches this; otherwise the layer may have a state instead, which doesn't grow
            with the row, or smaller numbers.
    """

    heads: int
    numbers: int
    window: int | None = None
    is_certain: bool = True

    def numbers_per_token(self, gpus: int) -> int:
        """Return the numbers of a token on all GPUs together; with more GPUs than heads, several hold the same head."""
        return self.numbers * (max(self.heads, gpus) if self.heads else max(1, gpus))


def cached_layers(settings: Mapping[str, Any]) -> tuple[CachedLayer, ...]:
    """Return what a model with attention heads caches; a layer may have several entries.

    Layers that share the keys and values of earlier ones cache nothing. A layer of an unknown kind, such as linear
    attention, counts as one of full attention that isn't certain.

    Args:
        settings: what `settings_of` returned.
    """
    kinds = settings.get("layer_types")
    last = settings["num_hidden_layers"] - (settings.get("num_kv_shared_layers") or 0)
    cached: list[CachedLayer] = []
    for layer in range(last):
        own = settings_of_layer(settings, layer)
        kind = kinds[layer] if kinds and layer < len(kinds) else None
        window = own.get("sliding_window") if kind in (None, _WINDOWED) else None
        is_certain = kind in _CERTAIN if kinds else not any(name in settings for name in _MIXED)
        cached += (CachedLayer(*size, window, is_certain) for size in _sizes(own))
        if own.get("index_head_dim"):  # the keys of DeepSeek's sparse attention, which vLLM quantizes
            cached.append(CachedLayer(0, own["index_head_dim"], is_certain=False))
    return tuple(cached)


def _sizes(own: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield heads and numbers per head of a layer's settings.

    Latent attention (DeepSeek-V2 and later) caches the compressed keys and values and the rotary part of the keys.
    """
    heads = own["num_attention_heads"]
    if own.get("kv_lora_rank") and own.get("qk_rope_head_dim"):
        if own.get("model_type") not in _UNCOMPRESSED:
            yield 0, own["kv_lora_rank"] + own["qk_rope_head_dim"]
        else:
            yield heads, 2 * (own["qk_nope_head_dim"] + own["qk_rope_head_dim"])
        return
    yield own.get("num_key_value_heads") or heads, 2 * (own.get("head_dim") or own["hidden_size"] // heads)
