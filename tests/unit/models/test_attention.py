import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlpack.models import attention as module
from rlpack.models.attention import Segments, attention
from rlpack.models.errors import ModelError
from rlpack.models.kernel_device import kernels_of

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


@pytest.mark.parametrize("sizes", [(8, 8), (20, 20), (24, 16), (8, 12)])
def test_varlen_kernels_get_heads_of_one_allowed_size_and_the_scale_of_the_original(monkeypatch, sizes):
    # CUDA kernels refuse heads that are not a multiple of 8, or of different sizes (as in multi-head latent attention).
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, heads, 9, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    ]
    upstream = torch.randn(1, 9, 4, sizes[1], generator=generator, dtype=torch.float64)
    seen: list[set[int]] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, packed: Segments, rules: module._Options) -> Tensor:
        seen.append({states.shape[-1] for states in (query, key, value)})
        back = (states.transpose(0, 1)[None] for states in (query, key, value))
        parts = zip(*(states.split(packed.lengths, 2) for states in back), strict=True)
        return torch.cat([module._attend(*part, rules) for part in parts], 2)[0].transpose(0, 1)

    def run() -> list[Tensor]:
        out, _ = attention(LAYER, *leaves, None, packed=Segments.from_lengths([4, 5]))
        return [out, *torch.autograd.grad((out * upstream).sum(), leaves)]

    expected = run()
    monkeypatch.setattr(module, "_varlen_kernel", lambda *_: kernel)
    found = run()
    (size,) = seen[0]
    assert size % 8 == 0
    assert size >= max(sizes)
    assert found[0].is_contiguous()
    for left, right in zip(found, expected, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_repeated_where_a_gpu_has_no_kernel_for_groups_but_the_one_that_stores_all_scores(
    monkeypatch, window: int | None, dtype: torch.dtype
):
    leaves = [states.detach().to(dtype) for states in states(6)]
    called: list[tuple[int, bool]] = []
    product = torch.nn.functional.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        called.append((key.shape[1], bool(options["enable_gqa"])))
        return product(query, key, value, **options)  # pyright: ignore[reportArgumentType]

    expected, _ = attention(LAYER, *leaves, None, scaling=0.3, sliding_window=window)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    with kernels_of("cuda"):
        found, _ = attention(LAYER, *leaves, None, scaling=0.3, sliding_window=window)
    has_kernel = dtype == torch.bfloat16 and window is None
    assert called == [(2, True) if has_kernel else (4, False)]
    assert torch.allclose(found, expected, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_torch_kernels_options_follow_the_installed_version(monkeypatch):
    calls: list[dict[str, object]] = []

    def newest(*states: object, scale=None, window_size=(-1, -1), enable_gqa=False, num_splits=None) -> Tensor:
        calls.append({"heads": states[1].shape[1], "enable_gqa": enable_gqa, "num_splits": num_splits})  # pyright: ignore[reportAttributeAccessIssue]
        return states[0]  # pyright: ignore[reportReturnType]

    def of_2_11(*states: object, return_aux=None, scale=None, window_size=(-1, -1)) -> Tensor:
        calls.append({"heads": states[1].shape[1]})  # pyright: ignore[reportAttributeAccessIssue]
        return states[0]  # pyright: ignore[reportReturnType]

    packed, rules = Segments.from_lengths([2, 4]), module._Options(scaling=0.3, dropout=0.0, window=None, softcap=None)
    flat = [leaf.detach()[0].transpose(0, 1) for leaf in states(6)]
    for function in (newest, of_2_11):
        module._torch_varlen_function.cache_clear()
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        module._torch_varlen(*flat, packed, rules)
    module._torch_varlen_function.cache_clear()
    assert calls == [{"heads": 2, "enable_gqa": True, "num_splits": 1}, {"heads": 2}]
