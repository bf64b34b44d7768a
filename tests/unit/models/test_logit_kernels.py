"""Triton's kernels for logits, and log-probs computed with them, against plain log_softmax in fp64.

On a GPU they are compiled. On a CPU, Triton interprets them (`TRITON_INTERPRET=1 pytest`, NumPy older than 2.4).
"""

import os

import pytest
import torch
from torch import Tensor

from rlpack.models import logprobs as module
from rlpack.models.logprobs import linear_logprobs
from rlpack.models.weight_split import VocabularyPart
from tests.unit.models.test_logprobs import naive

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:invalid value:RuntimeWarning"),
]
TOKENS, SIZE = 7, 12


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels wherever a GPU would, and read blocks shorter than the rows."""
    from rlpack.models import logit_kernels

    monkeypatch.setattr(logit_kernels, "_BLOCK", 64)
    monkeypatch.setattr(module, "_has_kernels", lambda hidden, bias: bias is None and hidden.dtype != torch.float64)


def case(words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(words)
    hidden = torch.randn(TOKENS, SIZE, generator=generator).to(dtype)
    weight = torch.randn(words, SIZE, generator=generator).to(dtype)
    return hidden, weight, torch.randint(words, (TOKENS,), generator=generator)


def differences(hidden: Tensor, weight: Tensor, labels: Tensor, *, entropy: bool, **options) -> dict[str, float]:
    """Return relative differences of results and gradients from those of fp64 with the same inputs."""
    upstream = torch.randn(2, len(labels), generator=torch.Generator().manual_seed(1))
    low = [each.clone().to(DEVICE).requires_grad_() for each in (hidden, weight)]
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    found = linear_logprobs(low[0], low[1], labels.to(DEVICE), entropy=entropy, chunk=3, **options)
    expected = naive(exact[0], exact[1], labels, **options)
    kept = slice(None) if entropy else slice(1)
    (torch.stack(found) * upstream.to(DEVICE))[kept].sum().backward()
    (torch.stack(expected) * upstream.double())[kept].sum().backward()
    pairs = {"log-probs": (found[0], expected[0]), "entropies": (found[1], expected[1])}
    if not entropy:
        assert not found[1].any()
        del pairs["entropies"]
    pairs |= {name: (left.grad, right.grad) for name, left, right in zip(("hidden", "weight"), low, exact, strict=True)}
    return {name: ((left.cpu().double() - right).norm() / right.norm()).item() for name, (left, right) in pairs.items()}


@pytest.mark.parametrize("words", [5, 64, 300])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(("softcap", "temperature"), [(None, 1.0), (None, 0.4), (2.0, 1.0), (2.0, 1.7)])
def test_values_and_gradients_in_fp32(words: int, entropy: bool, softcap: float | None, temperature: float):
    options = {"softcap": softcap, "temperature": temperature}
    found = differences(*case(words, torch.float32), entropy=entropy, **options)
    assert max(found.values()) < 2e-5, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_in_half_precision(dtype: torch.dtype):
    found = differences(*case(300, dtype), entropy=True, temperature=0.7)
    assert max(found.values()) < 2e-2, found


def test_huge_logits_stay_finite():
    hidden = torch.tensor([[1e4, 0.0], [-1e4, 0.0]], device=DEVICE, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]], device=DEVICE, requires_grad=True)
    logprobs, entropy = linear_logprobs(hidden, weight, torch.tensor([0, 0], device=DEVICE))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == [0.0, -2e4]
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


def test_zero_tokens_have_gradients_of_exactly_zero():
    hidden, weight, labels = (each.to(DEVICE) for each in case(300, torch.float32))
    weight.requires_grad_()
    logprobs, entropy = linear_logprobs(hidden[:0], weight, labels[:0])
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_labels_may_be_a_view_and_one_outside_of_the_vocabulary_is_no_number():
    hidden, weight, labels = (each.to(DEVICE) for each in case(300, torch.float32))
    expected = linear_logprobs(hidden, weight, labels)[0]
    view = torch.stack([labels, labels.flip(0)], 1)[:, 0]
    assert not view.is_contiguous()
    assert torch.equal(linear_logprobs(hidden, weight, view)[0], expected)
    labels[2] = 300
    found = linear_logprobs(hidden, weight, labels)[0]
    assert found.isnan().nonzero().flatten().tolist() == [2]


class PartHead(module._Head):
    """The head of a rank that has a part of the vocabulary, of which `tops` are the largest logits of all parts."""

    tops: Tensor

    def largest(self, logits: Tensor) -> Tensor:
        return self.tops[:, None]

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        return sums


def test_sums_of_parts_add_up_to_those_of_the_vocabulary():
    logits, labels = torch.randn(TOKENS, 300, device=DEVICE), torch.randint(300, (TOKENS,), device=DEVICE)
    x = logits.double() / 0.5
    top = x.amax(1)
    parts = []
    for first, last in ((0, 120), (120, 300), (300, 300)):
        part = VocabularyPart(None, first, 180)  # pyright: ignore[reportArgumentType]  # nothing is exchanged
        head = PartHead(0.5, None, 3, True, part, has_kernels=True)
        object.__setattr__(head, "tops", top.float())
        parts.append(module._sums_by_kernel(logits[:, first:last].contiguous(), labels, head))
    totals, means, found = (sum(one[place].double() for one in parts) for place in (1, 2, 3))
    weights = (x - top[:, None]).exp()
    assert torch.allclose(totals, weights.sum(1), rtol=1e-5)
    assert torch.allclose(means, (weights * (x - top[:, None])).sum(1), rtol=1e-4)
    assert torch.allclose(found, x.gather(1, labels[:, None])[:, 0], rtol=1e-6)
