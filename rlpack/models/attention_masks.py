"""Masks of causal attention: which keys a query sees, where the last query is at the position of the last key.

Letters: Q queries, K keys.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rlpack.models.kernel_device import is_simulated

# Queries per block where keys begin before the queries. Larger blocks would compute more scores that the mask hides.
_QUERY_BLOCK = 128
# Masks for at most this many keys are views of one cached matrix, of 1 MiB in fp32.
_BAND_KEYS = 512


def query_blocks(num_queries: int, num_keys: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries, and the keys that any query of the block sees.

    >>> list(query_blocks(2, 7, window=3))
    [(slice(0, 2, None), slice(3, 7, None))]
    """
    before = num_keys - num_queries
    for start in range(0, num_queries, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, num_queries)
        first = 0 if window is None else max(0, before + start - window + 1)
        yield slice(start, stop), slice(first, before + stop)


def causal_mask(length: int, window: int | None, device: torch.device, num_keys: int | None = None) -> Tensor:
    """Return bool [Q, K], true where a query (row) sees a key.

    A query sees itself and the window - 1 positions before it. The last query is at the position of the last key.

    >>> causal_mask(3, 2, torch.device("cpu")).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    >>> causal_mask(2, None, torch.device("cpu"), num_keys=3).int().tolist()
    [[1, 1, 0], [1, 1, 1]]

    Args:
        length: number of queries.
        window: number of keys that a query sees; None for all up to its position.
        device: device of the mask.
        num_keys: at least `length`; None for `length`.
    """
    before = 0 if num_keys is None else num_keys - length
    allowed = torch.ones(length, length + before, dtype=torch.bool, device=device).tril(before)
    return allowed if window is None else allowed.triu(before + 1 - window)


def mask_for_sdpa(query: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Return `causal_mask` in the form that scaled_dot_product_attention takes: bool [Q, K], or an additive mask.

    On CPUs, SDPA would convert a bool mask to an additive one in each call. There, masks for up to `_BAND_KEYS` keys
    are views of a single cached matrix.

    Args:
        query: [B, H, Q, D].
        num_keys: at least Q.
        window: keys that a query sees; None for all up to its position.
    """
    length = query.shape[2]
    has_values = type(query) is Tensor and query.device.type == "cpu" and not torch.compiler.is_compiling()
    if num_keys > _BAND_KEYS or not has_values or is_simulated():
        return causal_mask(length, window, query.device, num_keys)
    return _added_scores(window, query.dtype)[num_keys - length : num_keys, :num_keys]


@functools.lru_cache(maxsize=8)
def _added_scores(window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [K, K] of K = `_BAND_KEYS` keys: 0 where a query sees a key, else -inf."""
    # It outlives the caller's modes: one made in inference mode could not be used in training, for example.
    with _disable_current_modes(), torch.inference_mode(False):
        hidden = ~causal_mask(_BAND_KEYS, window, torch.device("cpu"))
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
