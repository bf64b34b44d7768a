"""Packed attention's CUDA kernels and the policy in bfloat16, against fp64 on the CPU."""

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from rlpack.config.sections.optimization import Optimizer
from rlpack.models import attention as module
from rlpack.models.attention import Segments, attention
from rlpack.models.checks import check_isolation
from rlpack.models.context_parallel import RowSplit
from rlpack.models.inputs import pack_rows
from rlpack.models.logprobs import _kernels, linear_logprobs
from rlpack.models.optimizers import build_optimizer, set_learning_rate
from rlpack.models.policy import Policy
from rlpack.models.row_parts import RowPart
from tests.unit.models.tiny import VOCABULARY, tiny_model, tiny_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [130, 1, 64, 257, 12]
KERNELS = ["segments", "torch"] + (["flash"] if importlib.util.find_spec("flash_attn") else [])


def run(leaves: list[Tensor], upstream: Tensor, **options: object) -> list[Tensor]:
    packed = Segments.from_lengths(LENGTHS, leaves[0].device)
    out, _ = attention(nn.Identity(), *leaves, None, packed=packed, scaling=0.1, **options)
    return [out, *torch.autograd.grad((out * upstream).sum(), leaves)]


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether a bf16 result is close; a window of one token makes gradients of queries and keys zero."""
    return bool((found.cpu().double() - expected).norm() < 0.02 * expected.norm() + 1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_every_kernel_agrees_with_fp64(monkeypatch, kernel: str, window: int | None, softcap: float | None):
    if kernel == "torch" and softcap is not None:
        pytest.skip("torch's varlen kernel has no soft cap")
    chosen = {"segments": None, "torch": module._torch_varlen, "flash": module._flash_attn}[kernel]
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, heads, sum(LENGTHS), 64, generator=generator).bfloat16().double().requires_grad_()
        for heads in (8, 2, 2)
    ]
    upstream = torch.randn(1, sum(LENGTHS), 8, 64, generator=generator).bfloat16().double()
    expected = run(exact, upstream, sliding_window=window, softcap=softcap)
    monkeypatch.setattr(module, "_varlen_kernel", lambda *_: chosen)
    low = [leaf.detach().to("cuda", torch.bfloat16).requires_grad_() for leaf in exact]
    found = run(low, upstream.to("cuda", torch.bfloat16), sliding_window=window, softcap=softcap)
    for left, right in zip(found, expected, strict=True):
        assert is_close(left, right)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 33, 200])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_kernel_lets_a_chunk_see_its_sequence_up_to_its_own_end(monkeypatch, kernel, window, rank):
    # The last query of a segment is at the position of its last key.
    part = RowPart.of(pack_rows(tiny_rows(LENGTHS)), RowSplit(None, rank, 2, method="all_gather"))
    assert part.packed.keys is not None
    sizes = (sum(part.packed.lengths), len(part.packed.keys.places))
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, heads, size, 64, generator=generator).bfloat16().double().requires_grad_()
        for heads, size in ((8, sizes[0]), (2, sizes[1]), (2, sizes[1]))
    ]
    upstream = torch.randn(1, sizes[0], 8, 64, generator=generator).bfloat16().double()
    rules = module._Options(scaling=0.1, dropout=0.0, window=window, softcap=None)

    def run_part(leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
        packed = RowPart.of(
            pack_rows(tiny_rows(LENGTHS)).to(leaves[0].device), RowSplit(None, rank, 2, method="all_gather")
        ).packed
        out = module._attend_packed(*leaves, packed, rules)
        return [out, *torch.autograd.grad((out * upstream).sum(), leaves)]

    expected = run_part(exact, upstream)
    chosen = {"segments": None, "torch": module._torch_varlen, "flash": module._flash_attn}[kernel]
    monkeypatch.setattr(module, "_varlen_kernel", lambda *_: chosen)
    low = [leaf.detach().to("cuda", torch.bfloat16).requires_grad_() for leaf in exact]
    for left, right in zip(run_part(low, upstream.to("cuda", torch.bfloat16)), expected, strict=True):
        assert is_close(left, right)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", [(20, 20), (192, 128), (64, 72)])
def test_heads_of_any_size_agree_with_fp64(monkeypatch, kernel: str, sizes: tuple[int, int]):
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, 4, sum(LENGTHS), size, generator=generator).bfloat16().double().requires_grad_()
        for size in (sizes[0], *sizes)
    ]
    upstream = torch.randn(1, sum(LENGTHS), 4, sizes[1], generator=generator).bfloat16().double()
    expected = run(exact, upstream)
    chosen = {"segments": None, "torch": module._torch_varlen, "flash": module._flash_attn}[kernel]
    monkeypatch.setattr(module, "_varlen_kernel", lambda *_: chosen)
    low = [leaf.detach().to("cuda", torch.bfloat16).requires_grad_() for leaf in exact]
    for left, right in zip(run(low, upstream.to("cuda", torch.bfloat16)), expected, strict=True):
        assert is_close(left, right)


def test_grouped_keys_in_fp32_store_no_scores():
    # Scores of a row of 8,192 tokens would take 2 GiB.
    shapes = ((8, 64), (2, 64), (2, 64))
    leaves = [torch.randn(1, heads, 8192, size, device="cuda", requires_grad=True) for heads, size in shapes]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = attention(nn.Identity(), *leaves, None, packed=Segments.from_lengths([8192], "cuda"))
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**28


def test_bfloat16_without_dropout_takes_a_varlen_kernel():
    rules = module._Options(scaling=None, dropout=0.0, window=None, softcap=None)
    query = torch.zeros(1, 2, 4, 64, device="cuda", dtype=torch.bfloat16)
    assert module._varlen_kernel(query, query, rules) is not None
    assert module._varlen_kernel(query.float(), query, rules) is None


@pytest.mark.parametrize("kind", ["qwen2_sliding", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_pass_the_isolation_check(kind: str, dtype: torch.dtype):
    changes = {"initializer_range": 0.02, "head_dim": 64}
    policy = Policy(tiny_model(kind, dtype=dtype, **changes).to("cuda"))
    check_isolation(policy, "cuda", VOCABULARY)


def test_scores_on_the_device_equal_those_on_the_cpu():
    inputs = pack_rows(tiny_rows([9, 1, 40, 6]))
    expected = Policy(tiny_model("qwen3", dtype=torch.float32).double())(inputs)  # other dtypes draw other weights
    found = Policy(tiny_model("qwen3", dtype=torch.float32).to("cuda"))(inputs.to("cuda"))
    assert torch.allclose(found.logprobs.cpu().double(), expected.logprobs, atol=1e-3)
    assert torch.allclose(found.entropy.cpu().double(), expected.entropy, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_log_probs_of_a_large_vocabulary_agree_with_fp64(dtype: torch.dtype, softcap: float | None):
    # Triton's kernels compute them; tests/unit/models/test_logit_kernels.py has small cases of every option.
    assert _kernels("cuda") is not None
    tokens, words, size = 300, 151_936, 64
    hidden = torch.randn(tokens, size, device="cuda").to(dtype)
    weight = (torch.randn(words, size, device="cuda") / 4).to(dtype)
    labels = torch.randint(words, (tokens,), device="cuda")
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    scores = ((logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.8).log_softmax(-1)
    expected = [scores.gather(1, labels[:, None])[:, 0], -(scores.exp() * scores).sum(-1)]
    low = [each.clone().requires_grad_() for each in (hidden, weight)]
    found = linear_logprobs(low[0], low[1], labels, temperature=0.8, softcap=softcap, chunk=128)
    for scored in (expected, found):
        (scored[0].sum() + 0.1 * scored[1].sum()).backward()
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    pairs = [
        *zip(found, expected, strict=True),
        *((left.grad, right.grad) for left, right in zip(low, exact, strict=True)),
    ]
    for left, right in pairs:
        assert left is not None
        assert right is not None
        assert (left.double() - right).norm() <= limit * right.norm()


def test_log_probs_take_a_tenth_of_the_naive_memory():
    tokens, words, size = 8192, 151_936, 256
    hidden = torch.randn(tokens, size, device="cuda", requires_grad=True)
    weight = torch.randn(words, size, device="cuda", requires_grad=True)
    labels = torch.randint(words, (tokens,), device="cuda")

    def peak(compute) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compute().sum().backward()
        used = torch.cuda.max_memory_allocated() - before
        hidden.grad = weight.grad = None
        return used

    naive = peak(lambda: (hidden @ weight.T).log_softmax(-1).gather(1, labels[:, None]))
    assert peak(lambda: linear_logprobs(hidden, weight, labels)[0]) <= naive / 10


@pytest.mark.usefixtures("eight_bit")
def test_moments_in_8_bits_make_steps_near_those_in_32():
    lines = []
    for name in ("adamw", "adamw_8bit"):
        torch.manual_seed(0)
        line = nn.Linear(256, 256, device="cuda")
        optimizer = build_optimizer(line, Optimizer(name=name, weight_decay=0.1))
        for rate in (0.01, 0.004):
            line.weight.grad, line.bias.grad = torch.randn_like(line.weight), torch.randn_like(line.bias)
            set_learning_rate(optimizer, rate)
            optimizer.step()
        lines.append(line.weight.detach())
    torch.manual_seed(0)
    moved = (lines[0] - nn.Linear(256, 256, device="cuda").weight).norm()
    assert 0 < (lines[1] - lines[0]).norm() < 0.1 * moved
