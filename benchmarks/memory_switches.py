"""Measure memory and time of a training step under the switches that trade one for the other.

    python benchmarks/memory_switches.py                                   # actor.gradient_checkpointing
    python benchmarks/memory_switches.py --switch reshard_after_forward    # two gloo ranks
    python benchmarks/memory_switches.py --switch offload --device cuda    # needs a GPU

Each setting runs in separate processes: passes of one packed microbatch of a Llama in fp32 (bf16 on a GPU), one thread
per rank. "kept" is what the forward pass leaves for the backward pass. The peak is that of a pass. Both are above the
memory before the pass, when weights, gradients and the kernels' buffers exist already: resident memory on a CPU, where
the allocator is told to return all memory at once, and allocated memory on a GPU. With `offload` a pass ends with an
optimizer step, and both figures are of the whole GPU: "kept" between two steps, and the peak. The time is the median of
other processes' passes, which have the allocator's defaults.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlpack.config.schema import Model
from rlpack.config.sections.optimization import Optimizer
from rlpack.gloo import GLOO
from rlpack.models.inputs import pack_rows
from rlpack.models.loading import build_causal_lm
from rlpack.models.optimizers import build_optimizer
from rlpack.models.parallel import clip_grad_norm, shard_model
from rlpack.models.policy import Policy

SWITCHES = {
    "gradient_checkpointing": ("none", "selective", "full"),
    "reshard_after_forward": ("false", "true"),
    "offload": ("none", "optimizer", "parameters"),
}
MIB = 2**20
# Tell glibc to return memory as soon as it is freed.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Memory:
    """The memory of this process, or of its GPU, in MiB."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"

    def now(self) -> float:
        """Return the memory in use."""
        return torch.cuda.memory_allocated() / MIB if self._on_gpu else self._status("VmRSS")

    def peak(self) -> float:
        """Return the most memory in use since `reset`."""
        return torch.cuda.max_memory_allocated() / MIB if self._on_gpu else self._status("VmHWM")

    def reset(self) -> None:
        """Start a new peak."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def _status(self, field: str) -> float:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def build_policy(arguments: argparse.Namespace) -> tuple[Policy, torch.optim.Optimizer | None]:
    """Return the model with the setting of this process, and an optimizer if that is measured."""
    hidden, setting = arguments.hidden, arguments.only
    shape = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 64 * 64,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
    }
    ids: dict[str, Any] = {"vocab_size": 1024, "eos_token_id": 0, "pad_token_id": 0, "seed": 0}
    policy = Policy(build_causal_lm(Model(config=shape), device=arguments.device, **ids), chunk=512)
    if arguments.switch == "gradient_checkpointing":
        policy.checkpoint_activations(setting)
        return policy, None
    backend = f"cpu:{GLOO},cuda:nccl" if arguments.device == "cuda" else GLOO
    place = {"rank": arguments.rank, "world_size": arguments.ranks}
    dist.init_process_group(backend, init_method=f"file://{arguments.store}", **place)
    mesh = init_device_mesh(arguments.device, (arguments.ranks,))
    precision = "bf16" if arguments.device == "cuda" else "fp32"
    if arguments.switch == "reshard_after_forward":
        shard_model(policy, mesh, precision=precision, reshard_after_forward=setting == "true", small_bytes=0)
        return policy, None
    shard_model(policy, mesh, precision=precision, offload=setting, small_bytes=0)
    return policy, build_optimizer(policy.pattern_root, Optimizer(), setting)


def run_one(arguments: argparse.Namespace) -> dict[str, float]:
    """Run the passes of one setting in this process."""
    torch.set_num_threads(1 if arguments.device == "cpu" else os.cpu_count() or 1)
    policy, optimizer = build_policy(arguments)
    policy.train()
    memory = Memory(arguments.device)
    torch.manual_seed(arguments.rank)
    rows = [torch.randint(1024, (length,)) for length in (arguments.tokens // 4,) * 4]

    def run(rows: list[torch.Tensor]) -> tuple[float, float]:
        start = time.perf_counter()
        loss = policy(pack_rows(rows).to(arguments.device), entropy=False).logprobs.sum() / len(rows)
        kept = memory.now()
        loss.backward()
        if optimizer is not None:
            clip_grad_norm(policy, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, kept

    run([row[:128] for row in rows])
    before = memory.now()
    memory.reset()
    results = [run(rows) for _ in range(arguments.passes)]
    if optimizer is not None:
        kept, peak = before, memory.peak()
    else:
        kept, peak = median(kept for _, kept in results) - before, memory.peak() - before
    return {"kept": kept, "peak": peak, "seconds": median(seconds for seconds, _ in results)}


def measure(setting: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the memory of one setting, and its time."""
    memory = run_ranks(setting, arguments, os.environ | RETURN_MEMORY)
    return memory | {"seconds": run_ranks(setting, arguments, dict(os.environ))["seconds"]}


def run_ranks(setting: str, arguments: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    """Run the ranks of one setting; return the first rank's figures."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(arguments.ranks):
            place = ["--rank", str(rank), "--ranks", str(arguments.ranks), "--store", f"{folder}/store"]
            command = [sys.executable, *sys.argv, "--only", setting, *place]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{arguments.switch}={setting} failed")
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    """Run every setting of a switch, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switch", choices=SWITCHES, default="gradient_checkpointing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the microbatch, four sequences")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--passes", type=int, default=3)
    for name, kind in (("--only", str), ("--rank", int), ("--ranks", int), ("--store", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.switch == "offload" and arguments.device == "cpu":
        parser.error("--switch offload needs --device cuda: without a GPU everything is in host memory")
    if arguments.only:
        print(json.dumps(run_one(arguments)))
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    arguments.ranks = 2 if arguments.switch == "reshard_after_forward" and arguments.device == "cpu" else 1
    results = {setting: measure(setting, arguments) for setting in SWITCHES[arguments.switch]}
    plain = next(iter(results.values()))
    print(
        f"| {arguments.switch} | kept | ratio | peak | ratio | time of a pass | ratio |\n|---|---|---|---|---|---|---|"
    )
    for setting, result in results.items():
        cells = [f"`{setting}`"]
        for name, unit, digits in (("kept", "MiB", 0), ("peak", "MiB", 0), ("seconds", "s", 2)):
            cells += [f"{result[name]:,.{digits}f} {unit}", f"{result[name] / plain[name]:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
