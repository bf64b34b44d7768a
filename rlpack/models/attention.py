"""Attention that keeps packed sequences apart, under the name `rlpack` in transformers' attention interface.

A packed row holds S sequences back to back; `Segments` holds their boundaries and reaches every layer as the keyword
`packed=`. Without it, rows are right-padded, and causal attention alone hides padding from real tokens.
No mask of the row's size is built: transformers makes none for a name that its mask interface doesn't know.

A segment's keys may begin before its queries (`SegmentKeys`), but both end at the same position. This is the case for
context parallelism with gathered keys, and for rows that share a prompt.

Letters: B rows, H heads, L positions of a row or a segment, D head size, T = B·L slots, S segments, Q queries of a
segment, K keys of a segment.
"""

import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlpack.models.attention_masks import causal_mask, mask_for_sdpa, query_blocks
from rlpack.models.context_parallel import RowSplit
from rlpack.models.errors import ModelError
from rlpack.models.kernel_device import is_simulated, kernel_device

NAME = "rlpack"
logger = logging.getLogger(__name__)

# Options that layers pass to their attention function. The values of the first are applied; the second have no effect
# on the result. Any other option might, so it is refused unless it is None or False.
_APPLIED = frozenset({"scaling", "dropout", "sliding_window", "softcap", "packed", "is_causal"})
_HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "return_dict", "position_embeddings"})


@dataclass
class Segments:
    """The boundaries of the sequences in one packed row.

    It is not frozen, but never changed: in PyTorch 2.11, compiled code is guarded on every field of a frozen dataclass
    that is passed through it, so layers would be compiled again for every number of sequences.

    Attributes:
        cu_seqlens: int32 [S+1] on the model's device, from 0 to the row's last slot. Every slot is in a segment:
            varlen kernels leave the output of others uninitialized.
        lengths: the segments' lengths on the host, so that no layer waits for the device.
        max_seqlen: length of the longest segment.
        split: the group whose ranks exchange tokens for heads; None if this rank needs only its own segments.
        keys: where the keys and values of these segments are; None if they are in the same slots as the queries.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    max_seqlen: int
    split: RowSplit | None = None
    keys: "SegmentKeys | None" = None

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device | str = "cpu") -> "Segments":
        """Build from lengths; empty segments are left out.

        >>> Segments.from_lengths([3, 0, 2]).cu_seqlens.tolist()
        [0, 3, 5]
        """
        nonempty = tuple(length for length in lengths if length > 0)
        ends = torch.tensor((0, *nonempty), dtype=torch.int64).cumsum(0).to(torch.int32)
        return cls(ends.to(device), nonempty, max(nonempty, default=0))

    def to(self, device: torch.device | str) -> "Segments":
        """Return a copy on a device."""
        keys = self.keys
        if keys is not None:
            keys = replace(keys, segments=keys.segments.to(device), places=keys.places.to(device, non_blocking=True))
        return replace(self, cu_seqlens=self.cu_seqlens.to(device, non_blocking=True), keys=keys)


@dataclass
class SegmentKeys:
    """The keys that segments of queries attend to.

    Attributes:
        segments: the boundaries of the keys: one segment for each segment of queries, which ends at the same position.
        places: int64 [Σ K], the slot of each key in the packed row; with `gathered_by` its place among the tokens of
            all ranks, rank by rank.
        gathered_by: the group whose ranks gather the keys of their slots; None if each rank has the keys of all slots.
    """

    segments: Segments
    places: Tensor
    gathered_by: RowSplit | None = None


# What FlashAttention supports, as flash-attn and in PyTorch: these dtypes, and heads up to this size.
_HALF = frozenset({torch.float16, torch.bfloat16})
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class _Options:
    """The attention options of a layer."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None


def register() -> None:
    """Register `rlpack` with transformers in this process, before a model is built; idempotent.

    What `rlpack.models.compiled_layers` has registered stays.
    """
    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(NAME, attention)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend causally within each packed segment, or within each right-padded row.

    Args:
        module: the layer; only its `is_causal` is read.
        query: [B, H, L, D]; B is 1 when packed.
        key: [B, H_kv, L, D].
        value: [B, H_kv, L, D].
        attention_mask: must be None.
        **options: from transformers: scaling, dropout, sliding_window, softcap; and ours, `packed`.

    Returns:
        The output [B, L, H, D], and None for the attention weights, as transformers expects.

    Raises:
        ModelError: the layer needs something that is not supported.
    """
    _check_supported(module, query, key, attention_mask, options)
    rules = _Options(
        scaling=options.get("scaling"),
        dropout=options.get("dropout", 0.0),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
    )
    packed: Segments | None = options.get("packed")
    if packed is None:
        return _attend(query, key, value, rules).transpose(1, 2).contiguous(), None
    if packed.keys is not None and (group := packed.keys.gathered_by) is not None:
        key, value = (group.gather_keys(states, packed.keys.places) for states in (key, value))
        return _attend_packed(query, key, value, packed, rules), None
    if (split := packed.split) is None or split.num_ranks == 1:
        return _attend_packed(query, *_keys_of_segments(key, value, packed), packed, rules), None
    split.check_heads(query.shape[1], type(module).__name__)
    query, key, value = split.to_heads(query), split.to_heads(key), split.to_heads(value)
    return split.to_tokens(_attend_packed(query, *_keys_of_segments(key, value, packed), packed, rules)), None


def _keys_of_segments(key: Tensor, value: Tensor, packed: Segments) -> tuple[Tensor, Tensor]:
    """Return keys and values of all segments, [1, H_kv, Σ K, D] each, from those of all slots."""
    if packed.keys is None:
        return key, value
    return key.index_select(2, packed.keys.places), value.index_select(2, packed.keys.places)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, packed: Segments, rules: _Options) -> Tensor:
    """Attend causally within each segment: [1, H, T, D] and the keys of all segments to [1, T, H, D]."""
    if (kernel := _varlen_kernel(query, value, rules)) is not None:
        return _attend_varlen(kernel, query, key, value, packed, rules)
    # split rather than slices: the backward of each slice would fill a whole row with zeros.
    keys = packed if packed.keys is None else packed.keys.segments
    queries = query.split(packed.lengths, 2)
    parts = zip(queries, *(states.split(keys.lengths, 2) for states in (key, value)), strict=True)
    return torch.cat([_attend(q, k, v, rules) for q, k, v in parts], 2).transpose(1, 2).contiguous()


def _attend_varlen(
    kernel: "_Kernel", query: Tensor, key: Tensor, value: Tensor, packed: Segments, rules: _Options
) -> Tensor:
    """Attend like `_attend_packed` with a varlen kernel, padding all heads with zeros to one supported size."""
    size, own = _varlen_size(query, value), value.shape[-1]
    if rules.scaling is None:
        rules = replace(rules, scaling=query.shape[-1] ** -0.5)
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    # F.pad would also copy states that need no padding.
    flat = [F.pad(each, (0, size - each.shape[-1])) if each.shape[-1] < size else each for each in flat]
    return kernel(flat[0], flat[1], flat[2], packed, rules)[..., :own].contiguous().unsqueeze(0)


def _varlen_size(query: Tensor, value: Tensor) -> int:
    """Return the head size that varlen kernels compute with: a multiple of 8, the same for all states."""
    size = max(query.shape[-1], value.shape[-1])
    return size + -size % 8


def _check_supported(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> None:
    """Raise for inputs whose result would be silently wrong."""
    kind = type(module).__name__
    if attention_mask is not None:
        raise ModelError(
            f"{kind} passed an attention mask; {NAME} attention takes segment boundaries from `packed` only"
        )
    if key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{kind} has {query.shape[2]} queries and {key.shape[2]} keys; {NAME} attention has no cache: "
            "call the model with use_cache=False, or generate with another attention implementation"
        )
    if vars(module).get("is_causal") is False or options.get("is_causal") is False:
        raise ModelError(f"{kind} is not causal; {NAME} attention supports causal language models only")
    for name, option in options.items():
        if name not in _APPLIED and name not in _HARMLESS and option is not None and option is not False:
            raise ModelError(f"{kind} passes {name}, which {NAME} attention does not support; use another model")
    packed = options.get("packed")
    if packed is None:
        return
    num_slots = sum(packed.lengths) // (1 if packed.split is None else packed.split.num_ranks)
    if (query.shape[0], query.shape[2]) != (1, num_slots):
        raise ModelError(
            f"{kind} has states of {query.shape[0]} x {query.shape[2]} slots, but its segments cover 1 x {num_slots}"
        )


def _attend(query: Tensor, key: Tensor, value: Tensor, rules: _Options) -> Tensor:
    """Attend causally along axis 2, the last query to the last key: [B, H, Q, D] and [B, H_kv, K, D] to [B, H, Q, D].

    If there are more keys than queries, each block of queries attends to the keys that any of its queries sees. A mask
    for all queries at once would be large, and would hide scores that need not be computed.
    """
    if query.shape[2] == key.shape[2]:
        return _attend_together(query, key, value, rules)
    blocks = query_blocks(query.shape[2], key.shape[2], rules.window)
    parts = [_attend_together(_narrow(query, q), _narrow(key, k), _narrow(value, k), rules) for q, k in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _narrow(states: Tensor, part: slice) -> Tensor:
    """Return part of axis 2; if that is all of it, skip the slice, whose backward would fill zeros and add to them."""
    whole = (part.start, part.stop) == (0, states.shape[2])
    return states if whole else states[:, :, part]


def _attend_together(query: Tensor, key: Tensor, value: Tensor, rules: _Options) -> Tensor:
    """Attend causally along axis 2 like `_attend`, with one kernel call."""
    if rules.softcap is not None:
        return _attend_with_softcap(query, key, value, rules)
    length, num_keys = query.shape[2], key.shape[2]
    # Kernels need no mask for plain causal attention, which includes windows at least as long as the row. With fewer
    # queries than keys, their own causal mask would align the first query with the first key.
    windowed = rules.window is not None and rules.window < num_keys
    band = mask_for_sdpa(query, num_keys, rules.window) if windowed or length < num_keys else None
    if query.shape[1] != key.shape[1] and not _has_grouped_kernel(query, value, band):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=band,
        dropout_p=rules.dropout,
        is_causal=band is None,
        scale=rules.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _has_grouped_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether SDPA has a kernel for fewer key heads than query heads, other than the one that stores all scores.

    On CUDA only FlashAttention does; with repeated keys, memory-efficient attention takes all other inputs.
    """
    if kernel_device(query) != "cuda":
        return True
    return mask is None and query.dtype in _HALF and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD


def _attend_with_softcap(query: Tensor, key: Tensor, value: Tensor, rules: _Options) -> Tensor:
    """Attend with scores capped to cap·tanh(score / cap) (Gemma 2, 2024).

    No SDPA kernel offers this.
    """
    assert rules.softcap is not None
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, 1) if repeats > 1 else states for states in (key, value))
    scale = query.shape[-1] ** -0.5 if rules.scaling is None else rules.scaling
    scores = (query @ key.transpose(2, 3)) * scale
    scores = rules.softcap * torch.tanh(scores / rules.softcap)
    allowed = causal_mask(query.shape[2], rules.window, query.device, key.shape[2])
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return F.dropout(weights, rules.dropout) @ value


_Kernel = Callable[[Tensor, Tensor, Tensor, Segments, _Options], Tensor]


def _varlen_kernel(query: Tensor, value: Tensor, rules: _Options) -> _Kernel | None:
    """Return a varlen kernel that supports the inputs, or None to attend segment by segment."""
    if kernel_device(query) != "cuda" or query.dtype not in _HALF or _varlen_size(query, value) > _LARGEST_HEAD:
        return None
    # flash-attn can't be simulated; torch's kernel keeps the same tensors.
    if not is_simulated() and flash_attn_function() is not None:
        return _flash_attn
    # torch's varlen kernel supports neither a soft cap nor dropout.
    return None if rules.softcap is not None or rules.dropout > 0 else _torch_varlen


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, packed: Segments, rules: _Options) -> Tensor:
    """Call flash-attn on [T, H, D]; of segments with more keys than queries it aligns the last ones."""
    function = flash_attn_function()
    assert function is not None
    keys = packed if packed.keys is None else packed.keys.segments
    return function(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        packed.cu_seqlens,
        keys.cu_seqlens,
        packed.max_seqlen,
        keys.max_seqlen,
        dropout_p=rules.dropout,
        softmax_scale=rules.scaling,
        causal=True,
        window_size=(-1, -1) if rules.window is None else (rules.window - 1, 0),
        softcap=rules.softcap or 0.0,
    )


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, packed: Segments, rules: _Options) -> Tensor:
    """Call torch's varlen attention on [T, H, D], whose causal mask is that of flash-attn."""
    keys = packed if packed.keys is None else packed.keys.segments
    function, parameters = _torch_varlen_function()
    options: dict[str, Any] = {}
    if "num_splits" in parameters:
        options["num_splits"] = 1  # a row's result doesn't depend on the longest row
    if "enable_gqa" in parameters:  # where it is missing, fewer key heads than query heads are never refused
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    return function(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        packed.cu_seqlens,
        keys.cu_seqlens,
        packed.max_seqlen,
        keys.max_seqlen,
        scale=rules.scaling,
        window_size=(-1, 0) if rules.window is None else (rules.window - 1, 0),
        **options,
    )


@functools.cache
def _torch_varlen_function() -> tuple[Callable[..., Any], frozenset[str]]:
    """Return torch's varlen attention and the names of its parameters; PyTorch 2.11 has fewer."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def flash_attn_function() -> Callable[..., Any] | None:
    """Return flash-attn's varlen attention; None if it is not installed, or if it can't be imported, with a warning."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:  # such as an undefined symbol: it was compiled for another PyTorch
        logger.warning(
            "flash-attn is installed, but can't be imported, so attention uses PyTorch's kernels: %s; compile it for "
            "PyTorch %s, or uninstall it",
            *(error, torch.__version__),
        )
        return None
    return flash_attn_varlen_func
