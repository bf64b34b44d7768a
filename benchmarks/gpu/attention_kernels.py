"""Row `kernels`: packed attention's kernels against fp64, and packed sequences against one of as many FLOPs."""

import importlib.util
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.figures import Figure, Setup, seconds_of
from rlpack.models import attention
from rlpack.models.attention import Segments

# Odd lengths, a single token, and one past a tile of the kernels.
LENGTHS = (130, 1, 64, 257, 12)
# Norm of the difference from fp64 over the norm of the result, in bf16.
ERROR = 0.02
SPEED = 0.9
# Heads, key-value heads and head size of a 7 B model.
HEADS, KEY_HEADS, HEAD_SIZE = 28, 4, 128


def measure(setup: Setup) -> Iterator[Figure]:
    """Yield the errors of each kernel, then its speed."""
    for name, kernel in kernels(setup.device).items():
        for window in (None, 33):
            errors = errors_of(kernel, setup.device, window)
            shown = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
            what = f"{name}, {'causal' if window is None else f'window of {window}'}: relative error against fp64"
            yield Figure(what, shown, f"at most {ERROR:g}", max(errors.values()) <= ERROR)
    if setup.device == "cuda":
        yield from speeds(setup)
    else:
        yield Figure("speed of the kernels", "not measured: there are no CUDA kernels on a CPU")


def kernels(device: str) -> dict[str, Callable[..., Tensor] | None]:
    """Return the kernels that the device and the installed packages have; None attends segment by segment."""
    available: dict[str, Callable[..., Tensor] | None] = {"segments": None}
    if device == "cuda":
        available["torch varlen"] = attention._torch_varlen
        if importlib.util.find_spec("flash_attn") is not None:
            available["flash-attn varlen"] = attention._flash_attn
    return available


def attend(kernel: Callable[..., Tensor] | None, states: list[Tensor], packed: Segments, window: int | None) -> Tensor:
    """Attend with one kernel: [1, H, T, D] and [1, H_kv, T, D] twice to [1, T, H, D]."""
    rules = attention._Options(scaling=None, dropout=0.0, window=window, softcap=None)
    chosen = attention._varlen_kernel
    attention._varlen_kernel = lambda *_: kernel
    try:
        return attention._attend_packed(states[0], states[1], states[2], packed, rules)
    finally:
        attention._varlen_kernel = chosen


def errors_of(kernel: Callable[..., Tensor] | None, device: str, window: int | None) -> dict[str, float]:
    """Return the relative errors of the output and of the three gradients, in bf16."""
    generator, size = torch.Generator().manual_seed(0), sum(LENGTHS)
    # Inputs that bf16 holds exactly, so that only the computation differs.
    exact = [
        torch.randn(1, heads, size, 64, generator=generator).bfloat16().double().requires_grad_() for heads in (8, 2, 2)
    ]
    upstream = torch.randn(1, size, 8, 64, generator=generator).bfloat16().double()
    low = [states.detach().to(device, torch.bfloat16).requires_grad_() for states in exact]

    def results(states: list[Tensor], upstream: Tensor, kernel: Callable[..., Tensor] | None) -> list[Tensor]:
        out = attend(kernel, states, Segments.from_lengths(list(LENGTHS), states[0].device), window)
        return [out, *torch.autograd.grad((out * upstream).sum(), states)]

    expected = results(exact, upstream, None)
    found = results(low, upstream.to(device, torch.bfloat16), kernel)
    parts = ("output", "query", "key", "value")
    return {
        part: ((left.cpu().double() - right).norm() / right.norm()).item()
        for part, left, right in zip(parts, found, expected, strict=True)
    }


def speeds(setup: Setup) -> Iterator[Figure]:
    """Yield each kernel's rate on packed rows, as a part of its rate on one causal sequence of as many FLOPs."""
    # FLOPs grow with the square of a length: 16 sequences of a quarter take those of the whole.
    longest = 2048 if setup.tiny else 16384
    rows = {"16 equal": [longest // 4] * 16, "uneven": uneven_lengths(longest)}
    for name, kernel in kernels(setup.device).items():
        if kernel is None:
            continue
        whole = forward_backward_s(kernel, [longest])
        yield Figure(f"{name}: one causal sequence of {longest:,}", rate(whole, longest))
        for kind, lengths in rows.items():
            flops = sum(length**2 for length in lengths) / longest**2
            ratio = flops * whole / forward_backward_s(kernel, lengths)
            what = f"{name}: rate on {kind} sequences, {sum(lengths):,} tokens, over that on one of {longest:,}"
            yield Figure(what, f"{ratio:.2f}", f"at least {SPEED:g}", setup.judged(ratio >= SPEED))
    yield Figure(f"scaled_dot_product_attention: one causal sequence of {longest:,}", rate(dense_s(longest), longest))


def rate(seconds: float, length: int) -> str:
    """Return the time and the rate of a forward and a backward pass, whose products are 2 and 5 of half the pairs.

    >>> rate(0.01, 16384)
    '10.00 ms, 673 TFLOP/s'
    """
    flops = 7 * HEADS * HEAD_SIZE * length**2
    return f"{1e3 * seconds:.2f} ms, {flops / seconds / 1e12:,.0f} TFLOP/s"


def uneven_lengths(longest: int) -> list[int]:
    """Return lengths from a sixteenth to a half of `longest` with about as many FLOPs as it.

    >>> lengths = uneven_lengths(16384)
    >>> round(sum(length**2 for length in lengths) / 16384**2, 2), min(lengths), max(lengths)
    (1.0, 1024, 8192)
    """
    shares = [1 / 2] * 2 + [1 / 4] * 6 + [1 / 8] * 6 + [1 / 16] * 8
    return [round(longest * share) for share in shares]


def forward_backward_s(kernel: Callable[..., Tensor] | None, lengths: list[int]) -> float:
    """Return the seconds of a forward and a backward pass in bf16."""
    states = random_states(sum(lengths))
    packed = Segments.from_lengths(lengths, "cuda")
    upstream = torch.randn(1, sum(lengths), HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    return seconds_of(lambda: torch.autograd.grad(attend(kernel, states, packed, None), states, upstream), "cuda")


def dense_s(length: int) -> float:
    """Return the seconds of a forward and a backward pass of PyTorch's own choice for one sequence."""
    query, key, value = states = random_states(length)
    upstream = torch.randn(1, HEADS, length, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)

    def run() -> object:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, states, upstream)

    return seconds_of(run, "cuda")


def random_states(size: int) -> list[Tensor]:
    """Return query, key and value, bf16 [1, heads, T, D], as a model's projections lay them out."""
    return [
        torch.randn(1, size, heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
