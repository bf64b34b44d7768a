"""Measure rlpack on one GPU, and write a section of benchmarks/RESULTS.md.

    make bench-gpu                                   # all rows
    python -m benchmarks.gpu --only kernels update   # some rows
    python -m benchmarks.gpu --output FILE           # write to another file, also from a tree with changes
    python -m benchmarks.gpu --device cpu --tiny     # that the benchmark itself works, without a GPU; prints only

From the root of a checkout, `python -m benchmarks.gpu` needs no installation of rlpack: PyTorch, transformers, NumPy
and Numba, pydantic and peft suffice for all rows but `train`, which also needs Ray, Hydra and psutil; `kernels` and
`logprobs` need only PyTorch and transformers. A row whose packages are missing is reported as failed, with their
names.

Rows: kernels, checks, logprobs, update, packing, memory, grpo, train. Each runs in a separate process, so that memory
is free again and a crash or a hang ends only that row. Exits with 1 if a row failed or missed a bar; everything is
printed and written all the same.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.gpu.figures import Setup
from benchmarks.gpu.rows import ROOT, ROWS, print_figures, run_row
from benchmarks.gpu.section import commit, part, surroundings, table, update

RESULTS = ROOT / "benchmarks" / "RESULTS.md"


def main(arguments: list[str] | None = None) -> int:
    """Run rows, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), help="run these rows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU; bars on time and memory are not judged")
    parser.add_argument("--output", type=Path, help="write the section into this file instead of RESULTS.md")
    parser.add_argument("--deadline", type=float, help="seconds that a row may take (default: the row's own limit)")
    parser.add_argument("--measure", choices=list(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible to PyTorch; --device cpu --tiny checks the benchmark itself", file=sys.stderr)
        return 2
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the sizes for GPUs would take hours on a CPU")
    setup = Setup(options.device, options.tiny)
    if options.measure:
        print_figures(options.measure, setup)
        return 0
    output = options.output or (RESULTS if setup == Setup("cuda") else None)
    if output == RESULTS and commit().endswith("-dirty"):
        parser.error("the tree has uncommitted changes, which RESULTS.md can't name; commit them, or use --output FILE")
    where, missed = surroundings(options.device), []
    print(where, flush=True)
    for name in options.only:
        outcome = run_row(name, setup, options.deadline)
        print(f"\n{name}: {ROWS[name].title}\n{table(outcome)}", flush=True)
        missed += [name] * (not outcome.is_kept)
        if output is not None:
            update(output, {name: part(name, outcome, where, setup)})
    print("\n" + (f"failed or missed a bar: {', '.join(missed)}" if missed else "all bars kept"))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
