"""Masks of causal attention show each query the keys of its window."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from rlpack.models.attention_masks import causal_mask, mask_for_sdpa


def visible(num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Return bool [Q, K] by the definition, pair by pair."""
    positions = range(num_keys - num_queries, num_keys)
    return torch.tensor(
        [[key <= query and (window is None or key > query - window) for key in range(num_keys)] for query in positions]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 1), (1, 9), (5, 5), (5, 12), (128, 512), (3, 513), (128, 600)]
)
def test_a_query_sees_the_keys_up_to_its_position(
    num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype
):
    query = torch.zeros(1, 1, num_queries, 8, dtype=dtype)
    truth = visible(num_queries, num_keys, window)
    mask = mask_for_sdpa(query, num_keys, window)
    if mask.dtype != torch.bool:
        assert mask.dtype == dtype
        assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
        mask = mask == 0
    assert torch.equal(mask, truth)
    assert torch.equal(causal_mask(num_queries, window, query.device, num_keys), truth)


def test_masks_first_used_in_inference_mode_can_be_trained_with():
    query = torch.randn(1, 2, 6, 8, requires_grad=True)
    key = torch.randn(1, 2, 11, 8)
    with torch.inference_mode():
        mask_for_sdpa(query, 11, window=10)
    F.scaled_dot_product_attention(query, key, key, attn_mask=mask_for_sdpa(query, 11, window=10)).sum().backward()
    assert query.grad is not None


def test_masks_first_used_without_values_have_values_later():
    query = torch.zeros(1, 1, 6, 8)
    with torch.device("meta"):
        mask_for_sdpa(query, 11, window=9)
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask_for_sdpa(query, 11, window=8)
    for window in (8, 9):
        mask = mask_for_sdpa(query, 11, window)
        assert type(mask) is torch.Tensor
        assert torch.equal(mask == 0, visible(6, 11, window))
