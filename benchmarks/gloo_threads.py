"""Repeat the crash of a gloo group with two threads, and show that one thread has none.

    python -m benchmarks.gloo_threads [--seconds 60]

One process per kind of group gathers a small tensor, 300 times before it waits, for `--seconds`. `rlpack.gloo` says
why two threads can crash. Exits with 1 if the group with one thread crashes. If the stock group doesn't crash within
some minutes on a version of PyTorch, `rlpack.gloo` may no longer be needed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BURST = 300


def gather_until_stopped(backend: str, seconds: float) -> None:
    """Gather in a group of this process alone, and print the number of gathers."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        group, tensor, count, end = dist.group.WORLD, torch.ones(13), 0, time.monotonic() + seconds
        assert group is not None
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        while time.monotonic() < end:
            for gathered in [gather(tensor, 1, group.group_name) for _ in range(BURST)]:
                torch.ops._c10d_functional.wait_tensor(gathered)
            count += BURST
        dist.destroy_process_group()
    print(f"{count:,} gathers", flush=True)


def main() -> int:
    """Run both kinds of groups, one after the other."""
    from rlpack.gloo import GLOO

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--backend", choices=("gloo", GLOO), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        gather_until_stopped(options.backend, options.seconds)
        return 0
    command = [sys.executable, "-m", "benchmarks.gloo_threads", "--seconds", str(options.seconds), "--backend"]
    root, code = Path(__file__).parent.parent, 0
    for backend in ("gloo", GLOO):
        done = subprocess.run([*command, backend], cwd=root, capture_output=True, text=True, check=False, timeout=600)
        code, said = done.returncode, (done.stdout or done.stderr).strip().splitlines()
        print(f"{backend}: exit code {code}, {said[0] if said else 'nothing printed'}", flush=True)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
