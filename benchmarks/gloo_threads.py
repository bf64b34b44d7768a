"""Repeat the crash of a gloo group with two threads, and compare the time of a step with one thread and with two.

    python -m benchmarks.gloo_threads [--seconds 60] [--repeats 9]

`rlpack.gloo` says why two threads can crash. One process per kind of group starts 300 small collectives before it waits
for them, for `--seconds`: all-gathers, whose name is long enough to be on the heap, and all-reduces, whose name is not.
If the stock group no longer crashes on a version of PyTorch, `rlpack.gloo` may not be needed there. Two ranks then run
forward and backward passes of a sharded model over groups of both kinds, in turns. Exits with 1 if the group with one
thread crashes.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import spawn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpack.gloo import GLOO
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy

RANKS, BURST, VOCABULARY = 2, 300, 512
# Hidden size and tokens of a pass: collectives take much of the first, matrix products most of the second.
SIZES = ((128, 256), (512, 512))


def communicate(backend: str, operation: str, seconds: float) -> None:
    """Run collectives in a group of this process alone, and print their number."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        assert dist.group.WORLD is not None
        functions: Any = torch.ops._c10d_functional
        name = dist.group.WORLD.group_name
        tensor, count, end = torch.ones(13), 0, time.monotonic() + seconds
        while time.monotonic() < end:
            pending = [
                functions.all_gather_into_tensor(tensor, 1, name)
                if operation == "all_gather"
                else functions.all_reduce(tensor, "sum", name)
                for _ in range(BURST)
            ]
            for result in pending:
                functions.wait_tensor(result)
            count += BURST
        dist.destroy_process_group()
    print(f"{count:,} collectives", flush=True)


def time_passes(rank: int, store: str, repeats: int) -> None:
    """Time forward and backward passes over both kinds of groups, and print the medians on the first rank."""
    torch.set_num_threads(1)
    dist.init_process_group(GLOO, init_method=f"file://{store}", rank=rank, world_size=RANKS)
    groups = {"gloo": dist.new_group(backend="gloo"), GLOO: dist.group.WORLD}
    for hidden, tokens in SIZES:
        inputs = pack_rows([torch.randint(VOCABULARY, (tokens // 4,)) for _ in range(4)])
        policies = {backend: _sharded_policy(hidden, group) for backend, group in groups.items()}
        times: dict[str, list[float]] = {backend: [] for backend in groups}
        for _ in range(1 + repeats):  # the first one warms up
            for backend, policy in policies.items():
                dist.barrier()
                start = time.perf_counter()
                policy(inputs).logprobs.sum().backward()
                dist.barrier()
                times[backend].append(time.perf_counter() - start)
        if rank == 0:
            medians = ", ".join(f"{name} {1e3 * statistics.median(each[1:]):.0f} ms" for name, each in times.items())
            print(f"hidden size {hidden}, {tokens} tokens: {medians}", flush=True)
    dist.destroy_process_group()


def _sharded_policy(hidden: int, group: Any) -> Policy:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    model: Any = Qwen2ForCausalLM(config)
    policy = Policy(model)
    shard_model(policy, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)), small_bytes=0)
    return policy.train()


def main() -> int:
    """Run all kinds of collectives and groups, one after the other, and then the passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        backend, operation = options.only
        communicate(backend, operation, options.seconds)
        return 0
    command = [sys.executable, "-m", "benchmarks.gloo_threads", "--seconds", str(options.seconds), "--only"]
    root, codes = Path(__file__).parent.parent, dict[tuple[str, str], int]()
    for backend, operation in (("gloo", "all_gather"), ("gloo", "all_reduce"), (GLOO, "all_gather")):
        whole, limit = [*command, backend, operation], options.seconds + 120
        done = subprocess.run(whole, cwd=root, capture_output=True, text=True, check=False, timeout=limit)
        codes[backend, operation], said = done.returncode, (done.stdout or done.stderr).strip().splitlines()
        print(
            f"{backend}, {operation}: exit code {done.returncode}, {said[0] if said else 'nothing printed'}", flush=True
        )
    with tempfile.TemporaryDirectory() as folder:
        spawn(time_passes, (f"{folder}/store", options.repeats), nprocs=RANKS)
    return int(codes[GLOO, "all_gather"] != 0)


if __name__ == "__main__":
    sys.exit(main())
