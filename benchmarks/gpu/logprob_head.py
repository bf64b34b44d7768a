"""Row `logprobs`: peak memory and time of the chunked head, against a plain log_softmax over all logits."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.figures import Figure, Setup, seconds_of
from rlpack.models.logprobs import linear_logprobs

MEMORY, TIME = 0.1, 1.0
ERROR = 1e-2


def measure(setup: Setup) -> Iterator[Figure]:
    """Yield the largest difference of a log-prob and of the gradients, then memory and time."""
    tokens, vocabulary, size = (96, 512, 32) if setup.tiny else (16_384, 151_936, 1536)
    dtype = torch.bfloat16
    generator = torch.Generator(setup.device).manual_seed(0)
    options = {"device": setup.device, "dtype": dtype, "generator": generator}
    hidden = torch.randn(tokens, size, **options).requires_grad_()
    weight = (torch.randn(vocabulary, size, **options) / size**0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=setup.device, generator=generator)
    heads: dict[str, Callable[[], Tensor]] = {
        "chunked": lambda: linear_logprobs(hidden, weight, labels, entropy=False)[0],
        "naive": lambda: naive_logprobs(hidden, weight, labels),
    }
    with torch.no_grad():
        gap = (heads["chunked"]() - heads["naive"]()).abs().max().item()
    what = f"largest difference of a log-prob, {tokens:,} tokens, {vocabulary:,} words, bf16"
    yield Figure(what, f"{gap:.1e} nats", f"at most {ERROR:g}", gap <= ERROR)

    def step(head: str) -> None:
        heads[head]().sum().backward()
        hidden.grad = weight.grad = None

    if setup.device == "cuda":
        peaks = {head: peak_bytes(lambda head=head: step(head)) for head in heads}
        ratio = peaks["chunked"] / peaks["naive"]
        shown = f"{peaks['chunked'] / 2**20:,.0f} of {peaks['naive'] / 2**20:,.0f} MiB: {ratio:.1%}"
        yield Figure("peak memory of the chunked head", shown, f"at most {MEMORY:.0%}", setup.judged(ratio <= MEMORY))
    times = {head: seconds_of(lambda head=head: step(head), setup.device, repeats=3, warm_up=1) for head in heads}
    ratio = times["chunked"] / times["naive"]
    shown = f"{1e3 * times['chunked']:.1f} ms against {1e3 * times['naive']:.1f} ms: {ratio:.2f}"
    yield Figure("time of the chunked head", shown, f"at most {TIME:g}", setup.judged(ratio <= TIME))


def naive_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return log-probs by definition, from the logits of all tokens in fp32."""
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]


def peak_bytes(run: Callable[[], None]) -> int:
    """Return the most GPU memory that a call has allocated at one time, above what was allocated before."""
    run()  # libraries allocate their workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
