import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlpack.models.attention import Segments, attention
from rlpack.models.errors import ModelError

LAYER = nn.Identity()


def states(slots: int, heads: int = 4, kv_heads: int = 2, rows: int = 1, size: int = 8) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(rows, count, slots, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )


def slow_attention(query: Tensor, key: Tensor, value: Tensor, segments: list[int], window, softcap) -> Tensor:
    """Attend one query of one head at a time, from the definition: [1, H, T, D] to [1, T, H, D]."""
    _, heads, slots, size = query.shape
    starts = [
        start
        for end, length in zip(torch.tensor(segments).cumsum(0).tolist(), segments, strict=True)
        for start in [end - length] * length
    ]
    out = []
    for position in range(slots):
        first = starts[position] if window is None else max(starts[position], position - window + 1)
        for head in range(heads):
            shared = head // (heads // key.shape[1])
            scores = key[0, shared, first : position + 1] @ query[0, head, position] * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out.append(scores.softmax(0) @ value[0, shared, first : position + 1])
    return torch.stack(out).view(1, slots, heads, size)


@settings(max_examples=25, deadline=None)
@given(
    segments=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(sum),
    window=st.sampled_from([None, 1, 2, 5]),
    softcap=st.sampled_from([None, 0.5]),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_each_token_sees_its_own_segment_back_to_the_window(segments, window, softcap, kv_heads):
    leaves = states(sum(segments), kv_heads=kv_heads)
    found, weights = attention(
        LAYER,
        *leaves,
        None,
        packed=Segments.from_lengths(segments),
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
    )
    expected = slow_attention(*leaves, segments, window, softcap)
    assert weights is None
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for left, right in zip(
        torch.autograd.grad((found * upstream).sum(), leaves),
        torch.autograd.grad((expected * upstream).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 3])
def test_padded_rows_attend_within_themselves(window: int | None, softcap: float | None):
    leaves = states(6, rows=3)
    found, _ = attention(LAYER, *leaves, None, scaling=0.3, sliding_window=window, softcap=softcap)
    for row in range(3):
        expected = slow_attention(*(leaf[row, None] for leaf in leaves), [6], window, softcap)
        assert torch.allclose(found[row], expected[0], rtol=0, atol=1e-12)


def test_padding_gets_finite_output_and_affects_no_gradient():
    leaves = states(9)
    found, _ = attention(LAYER, *leaves, None, packed=Segments.from_lengths([4, 5]))
    assert found.isfinite().all()
    for gradient in torch.autograd.grad(found[:, :4].sum(), leaves):
        assert gradient[:, :, 4:].eq(0).all()


def test_dropout_with_a_soft_cap_rescales_the_remaining_weights():
    torch.manual_seed(0)
    query, key, _ = states(64)
    value = torch.ones_like(key)
    found, _ = attention(LAYER, query, key, value, None, softcap=1.0, dropout=0.5)
    assert found.std() > 0.05
    assert abs(found.mean() - 1) < 0.1


def test_segments_leave_out_empty_ones():
    segments = Segments.from_lengths([0, 3, 0, 2])
    assert segments.lengths == (3, 2)
    assert segments.cu_seqlens.dtype == torch.int32
    assert (segments.cu_seqlens.tolist(), segments.max_seqlen) == ([0, 3, 5], 3)


@pytest.mark.parametrize("option", [{"s_aux": torch.ones(4)}, {"position_bias": torch.ones(1)}])
def test_an_unsupported_option_is_refused_by_name(option: dict):
    with pytest.raises(ModelError, match=next(iter(option))):
        attention(LAYER, *states(4), None, **option)


def test_masks_caches_wrong_segments_and_non_causal_layers_are_refused():
    query, key, value = states(4)
    with pytest.raises(ModelError, match="mask"):
        attention(LAYER, query, key, value, torch.ones(1, 1, 4, 4))
    with pytest.raises(ModelError, match="1 queries and 4 keys"):
        attention(LAYER, query[:, :, :1], key, value, None)
    with pytest.raises(ModelError, match=r"1 x 4 slots, but its segments cover 1 x 5"):
        attention(LAYER, query, key, value, None, packed=Segments.from_lengths([2, 3]))
    layer = nn.Identity()
    layer.is_causal = False
    with pytest.raises(ModelError, match="not causal"):
        attention(layer, query, key, value, None)
