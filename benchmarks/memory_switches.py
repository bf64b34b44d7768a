"""Measure memory and time of a training step under the switches that trade one for the other.

    python benchmarks/memory_switches.py                       # activation checkpointing: none, selective, full
    python benchmarks/memory_switches.py --tokens 8192 --layers 12 --hidden 768

Each setting runs in a separate process: a forward and backward pass of one packed microbatch of a Llama in fp32, on one
thread. "kept" is what the forward pass allocates and leaves for the backward pass. The peak is resident memory (VmHWM)
above that before the pass, when weights, gradients and the kernels' buffers exist already; it includes the gradients
and logits of a part of the pass, and memory that the allocator doesn't return. The time is the median of the passes.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rlpack.config.schema import Model
from rlpack.models.inputs import pack_rows
from rlpack.models.loading import build_causal_lm
from rlpack.models.policy import Policy

KINDS = ("none", "selective", "full")


def status_mib(field: str) -> float:
    """Return a figure of this process's status file (VmHWM: peak resident memory; VmRSS: now), in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def reset_peak() -> None:
    """Set the peak of resident memory (VmHWM) to the memory of now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Allocated(TorchDispatchMode):
    """Records the memory of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
            if isinstance(output, torch.Tensor):
                storage = output.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        return outputs

    def alive_mib(self, others: Iterable[torch.Tensor]) -> float:
        """Return the memory that is still in use, without that of `others`."""
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in others}
        sizes = (size for storage, size in self._sizes.items() if storage not in known and not storage.expired())
        return sum(sizes) / 2**20


def run_one(kind: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Run the passes of one setting in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = arguments.hidden
    shape = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 64 * 64,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
    }
    model = build_causal_lm(Model(config=shape), vocab_size=1024, eos_token_id=0, pad_token_id=0, seed=0)
    policy = Policy(model, chunk=512)
    policy.checkpoint_activations(kind)
    policy.train()
    rows = [torch.randint(1024, (length,)) for length in (arguments.tokens // 4,) * 4]

    def run(rows: list[torch.Tensor]) -> float:
        start = time.perf_counter()
        (policy(pack_rows(rows), entropy=False).logprobs.sum() / len(rows)).backward()
        return time.perf_counter() - start

    run([row[:128] for row in rows])
    peaks, times = [], []
    for _ in range(arguments.passes):
        before = status_mib("VmRSS")
        reset_peak()
        times.append(run(rows))
        peaks.append(status_mib("VmHWM") - before)
    inputs = pack_rows(rows)
    with Allocated() as allocated:
        logprobs = policy(inputs, entropy=False).logprobs
    kept = allocated.alive_mib([*policy.parameters(), *policy.buffers(), logprobs])
    gradients = [weight.grad.double().norm().item() for weight in policy.parameters() if weight.grad is not None]
    # The first pass touches the memory; the allocator may keep it for the next ones.
    return {"kept_mib": kept, "peak_mib": peaks[0], "seconds": median(times[1:] or times), "norm": sum(gradients)}


def main() -> None:
    """Run every setting in its own process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the microbatch, four sequences")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run_one(arguments.only, arguments)))
        return
    results: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--only", kind], check=True, stdout=subprocess.PIPE, text=True
        )
        results[kind] = json.loads(done.stdout.splitlines()[-1])
    plain = results["none"]
    assert all(result["norm"] == plain["norm"] for result in results.values()), "gradients differ"
    print("| gradient_checkpointing | kept | of none | peak | of none | time of a pass | of none |")
    print("|---|---|---|---|---|---|---|")
    for kind, result in results.items():
        cells = [f"`{kind}`"]
        for name, unit, digits in (("kept_mib", "MiB", 0), ("peak_mib", "MiB", 0), ("seconds", "s", 2)):
            cells += [f"{result[name]:,.{digits}f} {unit}", f"{result[name] / plain[name]:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
