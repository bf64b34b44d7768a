"""Token log-probabilities and entropies from hidden states, without the logits of all tokens.

Logits of T tokens over a vocabulary of V take T·V numbers: 5 GB for 8,192 tokens of Qwen3 in fp32, three times over in
a plain `log_softmax` with its backward. Here logits exist for one chunk at a time; the backward pass recomputes them.

Letters: T tokens, V vocabulary size, d hidden size, C tokens of one chunk.
"""

import functools
import importlib.util
import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlpack.models.cpu_products import matmul_transposed
from rlpack.models.kernel_device import is_simulated, kernel_device
from rlpack.models.weight_split import VocabularyPart

logger = logging.getLogger(__name__)

# Upper bound on the logits that exist at one time (128 MiB in fp32), regardless of `chunk`: 1,024 tokens suit a
# vocabulary of 32,000, but would take five times the memory for one of 152,000, at no gain.
MAX_LOGITS = 2**25
# On GPUs this many times as much. Each chunk reads the weight and adds to its gradient, V·d numbers both. With the 220
# tokens of a vocabulary of 152,000 that takes longer than the product (on an H100, below about 300).
GPU_FACTOR = 4
# With Triton's kernels, which need one buffer of logits in the dtype of the hidden states, not two in fp32.
KERNEL_FACTOR = 8
_KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class _Head:
    """The map from hidden states to the logits of the sampling distribution."""

    temperature: float
    softcap: float | None
    chunk: int
    entropy: bool
    part: VocabularyPart | None
    has_kernels: bool = False

    def largest(self, logits: Tensor) -> Tensor:
        """Return each token's largest logit over the vocabulary, [C, 1]."""
        top = logits.amax(1, keepdim=True) if logits.shape[1] else logits.new_full((len(logits), 1), -torch.inf)
        if self.part is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.part.group)
        return top

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Add sums over a rank's part of the vocabulary, each [C], over ranks."""
        if self.part is None:
            return sums
        together = torch.stack(sums)
        dist.all_reduce(together, group=self.part.group)
        return together.unbind()

    def columns(self, labels: Tensor, num_logits: int) -> tuple[Tensor, Tensor | None]:
        """Return the column of each label's logit, [C, 1], and which labels have none on this rank; None for none."""
        if self.part is None:
            return labels[:, None], None
        columns = self.own_columns(labels)
        others = (columns < 0) | (columns >= num_logits)
        return columns.masked_fill(others, 0)[:, None], others

    def own_columns(self, labels: Tensor) -> Tensor:
        """Return the column of each label's logit, [C], which another rank may have."""
        return labels if self.part is None else labels - self.part.start

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


class _Terms(NamedTuple):
    """What a chunk's gradient needs besides its logits, each [C]: results of the forward pass, and their gradients."""

    normalizers: Tensor
    means: Tensor
    by_logprob: Tensor
    by_entropy: Tensor


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
            if head.has_kernels:
                sums = _sums_by_kernel(matmul_transposed(hidden[part], weight), labels[part], head)
            else:
                sums = _sums(head.logits(hidden[part], weight, bias), labels[part], head)
            top, total, mean, label_logits = sums
            if head.entropy:
                means[part] = mean / total + top
            normalizers[part] = total.log() + top
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
        head: _Head = ctx.head
        by_logprob, by_entropy = gradients
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        # Sums over chunks accumulate in fp32 even when the weights are not.
        weight_gradient = weight.new_zeros(weight.shape, dtype=normalizers.dtype) if wants_weight else None
        bias_gradient = bias.new_zeros(bias.shape, dtype=normalizers.dtype) if wants_bias else None
        for start in range(0, hidden.shape[0], head.chunk):
            part = slice(start, start + head.chunk)
            terms = _Terms(normalizers[part], means[part], by_logprob[part], by_entropy[part])
            if head.has_kernels:
                gradient = matmul_transposed(hidden[part], weight)
                _replace_by_kernel(gradient, labels[part], terms, head)
            else:
                gradient = _gradient(head.logits(hidden[part], weight, bias), labels[part], terms, head)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = matmul_transposed(gradient, weight.t())
            if weight_gradient is not None and weight_gradient.dtype == hidden.dtype:
                weight_gradient.addmm_(gradient.t(), hidden[part])
            elif weight_gradient is not None:
                weight_gradient += gradient.t() @ hidden[part]
            del gradient  # or it would live until the next chunk has its own
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            None,
            None,
        )


def _sums(logits: Tensor, labels: Tensor, head: _Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a chunk's results need to know of its logits [C, V].

    With x a token's logits and m the largest: m, Σ exp(x − m), Σ exp(x − m)·(x − m) and the label's x, each [C]. The
    logits' buffer is used for the exponentials. Without entropies the third is 0.
    """
    label_logits = _at_labels(logits, labels, head)
    top = head.largest(logits)
    logits.sub_(top)
    if not head.entropy:
        total, label_logits = head.total(logits.exp_().sum(1), label_logits)
        return top[:, 0], total, torch.zeros_like(total), label_logits
    weights = logits.exp()
    total, mean, label_logits = head.total(weights.sum(1), weights.mul_(logits).sum(1), label_logits)
    return top[:, 0], total, mean, label_logits


def _sums_by_kernel(logits: Tensor, labels: Tensor, head: _Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return like `_sums`, from logits [C, V] in the dtype of the hidden states, before soft cap and temperature."""
    if is_simulated():
        top, total, mean, label_logits = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(4))
    else:
        top, total, mean, label_logits = _kernels(logits.device.type).sum_up(
            *(logits, head.own_columns(labels)),
            softcap=head.softcap,
            temperature=head.temperature,
            entropy=head.entropy,
            missing=math.nan if head.part is None else 0.0,  # a label of no rank must not be trained on
        )
    if head.part is not None:
        own, top = top, head.largest(top[:, None])[:, 0]
        # A rank without columns has no largest logit.
        shift, scale = (torch.where(total > 0, terms, 0.0) for terms in (total * (own - top), (own - top).exp()))
        total, mean, label_logits = head.total(scale * total, scale * (mean + shift), label_logits)
    return top, total, mean, label_logits


def _gradient(logits: Tensor, labels: Tensor, terms: _Terms, head: _Head) -> Tensor:
    """Return the gradient of hidden·weightᵀ + bias, [C, V]; the buffer of the logits may be used for another purpose.

    With p = softmax(x): d logprob / dx = onehot - p and d entropy / dx = -p·(x - Σ p·x).
    """
    gradient = (logits - terms.normalizers[:, None]).exp_()
    if head.entropy:
        # The soft cap needs the logits again; without one, their buffer is free.
        factor = logits.clone() if head.softcap is not None else logits
        factor.sub_(terms.means[:, None]).mul_(terms.by_entropy[:, None]).add_(terms.by_logprob[:, None])
        gradient.mul_(factor).neg_()
    else:
        gradient.mul_(terms.by_logprob[:, None]).neg_()
    _add_at_labels(gradient, labels, terms.by_logprob, head)
    return head.softcap_backward(gradient, logits)


def _replace_by_kernel(logits: Tensor, labels: Tensor, terms: _Terms, head: _Head) -> None:
    """Replace hidden·weightᵀ, [C, V], by its gradient in place, like `_gradient`."""
    if is_simulated():
        return
    _kernels(logits.device.type).replace_by_gradients(
        *(logits, head.own_columns(labels), *terms),
        softcap=head.softcap,
        temperature=head.temperature,
        entropy=head.entropy,
    )


@functools.cache
def _kernels(device_type: str) -> Any:
    """Return the module of Triton's kernels; None if Triton is missing or can't run them, with a warning."""
    if importlib.util.find_spec("triton") is None:  # it is installed with PyTorch for CUDA
        return None
    try:
        from rlpack.models import logit_kernels

        logits, terms = torch.zeros(1, 2, device=device_type), torch.zeros(4, 1, device=device_type)
        columns = torch.zeros(1, dtype=torch.int64, device=device_type)
        options: dict[str, Any] = {"softcap": None, "temperature": 1.0, "entropy": True}
        logit_kernels.sum_up(logits, columns, missing=0.0, **options)
        logit_kernels.replace_by_gradients(logits, columns, *terms, **options)
    except Exception as error:  # noqa: BLE001 - Triton's own, those of its compiler, and those of the C compiler
        logger.warning(
            "Triton can't run the kernels for log-probs, so PyTorch's operations are used, which take longer: %s; "
            "Triton needs a C compiler and Python's headers",
            error,
        )
        return None
    return logit_kernels


def _has_kernels(hidden: Tensor, bias: Tensor | None) -> bool:
    """Return whether Triton's kernels compute with these inputs. Heads with a bias are rare, and have none."""
    if bias is not None or kernel_device(hidden) != "cuda" or hidden.dtype not in _KERNEL_DTYPES:
        return False
    return is_simulated() or _kernels(hidden.device.type) is not None


def _at_labels(logits: Tensor, labels: Tensor, head: _Head) -> Tensor:
    """Return each label's logit, [C]; 0 where another rank has it."""
    columns, others = head.columns(labels, logits.shape[1])
    if others is not None and not logits.shape[1]:
        return logits.new_zeros(len(logits))
    found = logits.gather(1, columns)[:, 0]
    return found if others is None else found.masked_fill_(others, 0.0)


def _add_at_labels(gradient: Tensor, labels: Tensor, by_logprob: Tensor, head: _Head) -> None:
    """Add the gradients of log-probs, [C], to those of the labels' logits in place, where this rank has them."""
    columns, others = head.columns(labels, gradient.shape[1])
    if gradient.shape[1]:
        by_logprob = by_logprob if others is None else by_logprob.masked_fill(others, 0.0)
        gradient.scatter_add_(1, columns, by_logprob[:, None])


def linear_logprobs(  # noqa: PLR0913 - the options of one formula
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    softcap: float | None = None,
    bias: Tensor | None = None,
    entropy: bool = True,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each token's log-probability, and the entropy of the distribution that it came from.

    The distribution is softmax(logits / temperature), with logits = hidden · weightᵀ + bias, capped to
    softcap · tanh(logits / softcap) if a soft cap is given. [T, V] never exists: memory is two to three times the
    logits of min(chunk, 2²⁵ / V) tokens in fp32 (2²⁷ / V on a GPU), plus the weight's gradient. On a GPU with Triton
    and without a bias, it is the logits of min(chunk, 2²⁸ / V) tokens in the dtype of hidden. Both results are
    differentiable once with respect to hidden, weight and bias. Zero tokens give empty results that are still part of
    the graph, with gradients of exactly zero.

    Args:
        hidden: [T, d].
        weight: [V, d].
        labels: int64 [T].
        temperature: divides the logits, after the soft cap.
        chunk: maximum number of tokens whose logits exist at one time.
        softcap: bound on the logits (Gemma 2).
        bias: [V].
        entropy: if false, the second result is zeros without a gradient, at no cost.
        part: the ranks that share the vocabulary, and this rank's place: weight and bias are its rows. Both results are
            then the same on all of these ranks, and the gradients of hidden are summands. A collective.

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
    has_kernels = _has_kernels(hidden, bias)
    factor = KERNEL_FACTOR if has_kernels else GPU_FACTOR if kernel_device(hidden) == "cuda" else 1
    most = MAX_LOGITS * factor
    # Ranks with fewer rows than others make the same chunks.
    chunk = max(1, min(chunk, most // (weight.shape[0] if part is None else part.most)))
    head = _Head(temperature, softcap, chunk, entropy, part, has_kernels)
    return _LinearLogprobs.apply(hidden, weight, bias, labels, head)  # pyright: ignore[reportReturnType]
