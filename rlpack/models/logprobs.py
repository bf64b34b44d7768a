"""Token log-probabilities and entropies from hidden states, without the logits of all tokens.

Logits of T tokens over a vocabulary of V take T·V numbers: 5 GB for 8,192 tokens of Qwen3 in fp32, three times over in
a plain `log_softmax` with its backward. Here logits exist for one chunk at a time; the backward pass recomputes them.

Letters: T tokens, V vocabulary size, d hidden size, C tokens of one chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlpack.models.cpu_products import matmul_transposed

# Upper bound on the logits that exist at one time (128 MiB in fp32), whatever `chunk` is: 1,024 tokens suit a
# vocabulary of 32,000, and would take five times as much for one of 152,000 at no gain.
MAX_LOGITS = 2**25


@dataclass(frozen=True)
class _Head:
    """The map from hidden states to the logits of the sampling distribution."""

    temperature: float
    softcap: float | None
    chunk: int
    entropy: bool

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits [C, V] of one chunk, in fp32 or higher precision."""
        logits = matmul_transposed(hidden, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if bias is not None:
            logits += bias
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def softcap_backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Convert the gradient of `logits`, in place, to that of hidden·weightᵀ + bias."""
        if self.softcap is not None:
            # d cap·tanh(x/cap) = 1 - tanh²; the logits hold cap·tanh/temperature.
            gradient.mul_(logits.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0))
        return gradient if self.temperature == 1.0 else gradient.div_(self.temperature)


class _LinearLogprobs(torch.autograd.Function):
    """Chunked log-probabilities and entropies, with logits recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normalizers, means = (hidden.new_zeros(hidden.shape[0], dtype=dtype) for _ in range(3))
        for start in range(0, hidden.shape[0], head.chunk):
            part = slice(start, start + head.chunk)
            logits = head.logits(hidden[part], weight, bias)
            label_logits = logits.gather(1, labels[part, None])[:, 0]
            # logsumexp by hand, so that one buffer serves logits, exponentials and the entropy's mean.
            top = logits.amax(1, keepdim=True)
            logits.sub_(top)
            if head.entropy:
                weights = logits.exp()
                total = weights.sum(1)
                means[part] = weights.mul_(logits).sum(1) / total + top[:, 0]
                del weights
            else:
                total = logits.exp_().sum(1)
            del logits
            normalizers[part] = total.log_() + top[:, 0]
            logprobs[part] = label_logits - normalizers[part]
        ctx.save_for_backward(hidden, weight, bias, labels, normalizers, means)
        ctx.head = head
        entropy = normalizers - means if head.entropy else torch.zeros_like(normalizers)
        if not head.entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, labels, normalizers, means = ctx.saved_tensors
        head, (by_logprob, by_entropy) = ctx.head, gradients
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        # Sums over chunks accumulate in fp32 even when the weights are not.
        weight_gradient = weight.new_zeros(weight.shape, dtype=normalizers.dtype) if wants_weight else None
        bias_gradient = bias.new_zeros(bias.shape, dtype=normalizers.dtype) if wants_bias else None
        for start in range(0, hidden.shape[0], head.chunk):
            part = slice(start, start + head.chunk)
            logits = head.logits(hidden[part], weight, bias)
            # With p = softmax(x): d logprob / dx = onehot - p and d entropy / dx = -p·(x - Σ p·x).
            gradient = (logits - normalizers[part, None]).exp_()
            if head.entropy:
                # The soft cap needs the logits again; without one, their buffer is free.
                factor = logits.clone() if head.softcap is not None else logits
                factor.sub_(means[part, None]).mul_(by_entropy[part, None]).add_(by_logprob[part, None])
                gradient.mul_(factor).neg_()
                del factor
            else:
                gradient.mul_(by_logprob[part, None]).neg_()
            gradient.scatter_add_(1, labels[part, None], by_logprob[part, None])
            gradient = head.softcap_backward(gradient, logits)
            del logits
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = matmul_transposed(gradient, weight.t())
            if weight_gradient is not None and weight_gradient.dtype == hidden.dtype:
                weight_gradient.addmm_(gradient.t(), hidden[part])
            elif weight_gradient is not None:
                weight_gradient += gradient.t() @ hidden[part]
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            None,
            None,
        )


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    softcap: float | None = None,
    bias: Tensor | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return each token's log-probability, and the entropy of the distribution that it came from.

    The distribution is softmax(logits / temperature), with logits = hidden · weightᵀ + bias, capped to
    softcap · tanh(logits / softcap) if a soft cap is given. [T, V] never exists: memory is two to three times the
    logits of min(chunk, 2²⁵ / V) tokens, plus the weight's gradient. Both results are differentiable once with respect
    to hidden, weight and bias. Zero tokens give empty results that are still part of the graph, with gradients of
    exactly zero.

    Args:
        hidden: [T, d].
        weight: [V, d].
        labels: int64 [T].
        temperature: divides the logits, after the soft cap.
        chunk: maximum number of tokens whose logits exist at one time.
        softcap: bound on the logits (Gemma 2).
        bias: [V].
        entropy: if false, the second result is zeros without a gradient, at no cost.

    Returns:
        (log-probabilities, entropies), both [T], in nats, fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: temperature or chunk is not positive.

    >>> hidden, weight = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    >>> logprobs, entropies = linear_logprobs(hidden, weight, torch.tensor([1, 0]))
    >>> [round(value, 4) for value in logprobs.tolist()], [round(value, 4) for value in entropies.tolist()]
    ([-0.3133, -0.6931], [0.5822, 0.6931])
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    chunk = max(1, min(chunk, MAX_LOGITS // weight.shape[0]))
    head = _Head(temperature, softcap, chunk, entropy)
    return _LinearLogprobs.apply(hidden, weight, bias, labels, head)  # pyright: ignore[reportReturnType]
