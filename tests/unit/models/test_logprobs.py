import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlpack.models import logprobs as module
from rlpack.models.kernel_device import kernels_of
from rlpack.models.logprobs import linear_logprobs


def case(tokens: int, words: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(words, size, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(words, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, bias, torch.randint(words, (tokens,), generator=generator)


def naive(hidden, weight, labels, *, temperature=1.0, softcap=None, bias=None) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(1, labels[:, None])[:, 0], -(scores.exp() * scores).sum(-1)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 9),
    words=st.integers(1, 7),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    softcap=st.sampled_from([None, 1.5]),
    with_bias=st.booleans(),
)
def test_values_and_gradients_equal_those_of_log_softmax(tokens, words, chunk, temperature, softcap, with_bias):
    hidden, weight, bias, labels = case(tokens, words, size=4)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    options = {"temperature": temperature, "softcap": softcap, "bias": bias if with_bias else None}
    upstream = torch.randn(2, tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = linear_logprobs(hidden, weight, labels, chunk=chunk, **options)
    expected = naive(hidden, weight, labels, **options)
    for left, right in zip(found, expected, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-12)
    losses = [(upstream * torch.stack(scores)).sum() for scores in (found, expected)]
    for left, right in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        assert torch.allclose(left, right, rtol=1e-10, atol=1e-11)


def test_gradients_equal_finite_differences():
    hidden, weight, bias, labels = case(tokens=5, words=6, size=3)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_logprobs(h, w, labels, temperature=0.8, chunk=2, softcap=2.0, bias=b),
        (hidden, weight, bias),
    )


def test_uniform_logits_give_minus_log_v_and_entropy_log_v():
    logprobs, entropy = linear_logprobs(torch.ones(3, 2), torch.zeros(8, 2), torch.tensor([0, 3, 7]))
    assert torch.allclose(logprobs, -torch.full((3,), 8.0).log())
    assert torch.allclose(entropy, torch.full((3,), 8.0).log())


def test_huge_logits_stay_finite():
    hidden = torch.tensor([[1e4, 0.0], [-1e4, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]], requires_grad=True)
    logprobs, entropy = linear_logprobs(hidden, weight, torch.tensor([0, 0]))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == [0.0, -2e4]
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_zero_tokens_keep_the_graph_with_gradients_of_exactly_zero():
    hidden, weight, bias, labels = case(tokens=0, words=5, size=3)
    logprobs, entropy = linear_logprobs(hidden, weight, labels, bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    for leaf in (weight, bias):
        assert leaf.grad is not None
        assert leaf.grad.eq(0).all()


def test_a_frozen_weight_gets_no_gradient_and_hidden_gets_the_same():
    hidden, weight, _, labels = case(tokens=4, words=5, size=3)
    linear_logprobs(hidden, weight.detach(), labels)[0].sum().backward()
    expected = torch.autograd.grad(naive(hidden, weight, labels)[0].sum(), hidden)[0]
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, expected, atol=1e-12)


def test_bfloat16_inputs_give_fp32_results_near_the_exact_ones():
    hidden, weight, _, labels = case(tokens=32, words=64, size=16)
    low = [hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in low]
    found, expected = linear_logprobs(low[0], low[1], labels, chunk=5), naive(exact[0], exact[1], labels)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert torch.allclose(found[0].double(), expected[0], atol=0.1)
    (found[0].sum() + found[1].sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for left, right in zip(low, exact, strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert left.grad.dtype == torch.bfloat16
        assert (left.grad.double() - right.grad).norm() / right.grad.norm() < 0.02


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(("chunk", "max_logits", "rows"), [(4, 2**25, 4), (1024, 300, 3), (1024, 1, 1)])
def test_no_tensor_is_larger_than_one_chunk_of_logits(monkeypatch, chunk: int, max_logits: int, rows: int):
    monkeypatch.setattr(module, "MAX_LOGITS", max_logits)
    hidden, weight, _, labels = case(tokens=64, words=100, size=1)
    with LargestTensor() as seen:
        logprobs, entropy = linear_logprobs(hidden, weight, labels, chunk=chunk, softcap=3.0)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.numel == rows * 100
    with LargestTensor() as seen:
        naive(hidden, weight, labels)
    assert seen.numel == 64 * 100


class LiveTensors(TorchDispatchMode):
    """Counts the storages of at least some size that are alive at the same time."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__()
        self.least_bytes, self.most, self.alive = least_bytes, 0, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage() if isinstance(out, Tensor) else None
        if storage is not None and storage.nbytes() >= self.least_bytes and storage._cdata not in self.alive:
            self.alive.add(storage._cdata)
            weakref.finalize(storage, self.alive.discard, storage._cdata)
            self.most = max(self.most, len(self.alive))
        return out


@pytest.mark.parametrize(("entropy", "softcap", "most"), [(True, None, 2), (False, None, 2), (True, 3.0, 3)])
def test_few_chunks_of_logits_exist_at_one_time(entropy: bool, softcap: float | None, most: int):
    hidden, weight, _, labels = case(tokens=32, words=100, size=1)
    with LiveTensors(8 * 100 * hidden.element_size()) as seen:
        logprobs, entropies = linear_logprobs(hidden, weight, labels, chunk=8, softcap=softcap, entropy=entropy)
        (logprobs.sum() + entropies.sum()).backward()
    assert seen.most == most


def test_chunks_are_larger_on_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", 300)
    hidden, weight, _, labels = case(tokens=64, words=100, size=1)
    with kernels_of("cuda"), LargestTensor() as seen:
        linear_logprobs(hidden, weight, labels)
    assert seen.numel == module.GPU_FACTOR * 300


def test_where_triton_cannot_run_pytorch_computes_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: object())  # installed, but there is no GPU
    module._kernels.cache_clear()
    try:
        assert module._kernels("cpu") is None
    finally:
        module._kernels.cache_clear()
    assert "Triton can't run the kernels for log-probs, so PyTorch's operations are used" in caplog.text


@pytest.mark.parametrize(("options", "message"), [({"temperature": 0.0}, "temperature"), ({"chunk": 0}, "chunk")])
def test_invalid_settings_are_named(options: dict, message: str):
    hidden, weight, _, labels = case(tokens=2, words=3, size=2)
    with pytest.raises(ValueError, match=message):
        linear_logprobs(hidden, weight, labels, **options)
