"""Measure the peak memory of log-probs from hidden states, forward and backward, against a plain log_softmax.

    python benchmarks/logprob_memory.py [--tokens 8192] [--vocabulary 151936] [--hidden 256] [--skip-naive]

Each runs in a separate process; what counts is the process's peak resident memory (VmHWM) above what it had once
the inputs were there. The plain one needs about 15 GiB at the default sizes, and does not start unless that is free.
Exits with 1 when rlpack takes more than 1/20.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from rlpack.models.logprobs import linear_logprobs

BAR = 20


def status_mib(field: str) -> float:
    """Return a figure of this process's status file (VmHWM: peak resident memory; VmRSS: now), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def available_mib() -> float:
    """Return the machine's available memory in MiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable"))


def run_one(kind: str, tokens: int, vocabulary: int, hidden_size: int) -> None:
    """Do one forward and backward in this process; print its peak above the inputs and its time."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    # The libraries' own buffers come with the first use; they are no part of the path's memory.
    linear_logprobs(hidden[:8], weight[:64], labels[:8] % 64)[0].sum().backward()
    hidden.grad = weight.grad = None
    before, start = status_mib("VmRSS"), time.perf_counter()
    if kind == "naive":
        logprobs = (hidden @ weight.t()).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    else:
        logprobs = linear_logprobs(hidden, weight, labels)[0]
    logprobs.sum().backward()
    print(status_mib("VmHWM") - before, time.perf_counter() - start, logprobs.double().mean().item())


def measure(kind: str, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Run one kind in its own process; return its peak in MiB, its seconds and the mean log-prob."""
    sizes = [str(arguments.tokens), str(arguments.vocabulary), str(arguments.hidden)]
    command = [
        sys.executable,
        __file__,
        "--only",
        kind,
        *(text for pair in zip(("--tokens", "--vocabulary", "--hidden"), sizes, strict=True) for text in pair),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, seconds, mean = map(float, done.stdout.split())
    print(f"{kind:7} peak {peak:9,.0f} MiB above inputs, {seconds:6.1f} s, mean log-prob {mean:.6f}")
    return peak, seconds, mean


def main() -> int:
    """Measure both, print, and compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--skip-naive", action="store_true")
    parser.add_argument("--only", choices=["naive", "rlpack"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        run_one(arguments.only, arguments.tokens, arguments.vocabulary, arguments.hidden)
        return 0
    ours, _, mean = measure("rlpack", arguments)
    if arguments.skip_naive:
        return 0
    # Logits, log-probs and the gradient of one of them live at the same time.
    needed = 3 * 4 * arguments.tokens * arguments.vocabulary / 2**20 + 1024
    if available_mib() < needed:
        print(f"naive   needs about {needed:,.0f} MiB and {available_mib():,.0f} MiB are available; not run")
        return 1
    naive, _, expected = measure("naive", arguments)
    assert abs(mean - expected) < 1e-3 * abs(expected)
    print(f"naive/rlpack: {naive / ours:.1f} (at least {BAR})")
    return int(naive < BAR * ours)


if __name__ == "__main__":
    sys.exit(main())
