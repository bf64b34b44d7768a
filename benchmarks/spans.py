"""What recording spans takes: the time of one, and of all spans of a run as a share of its steps.

    python benchmarks/spans.py [RUN_DIR] [--repeats 20000]

Without a run, one of the smallest size is made. Exits with 1 if any process spends more than 1 % of the steps on spans.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlpack.observe.trace import read_spans, train_steps
from rlpack.spans import recorded_spans, span

BAR = 0.01
SMALL = ("experiment=smoke", "trainer.steps=6", "trainer.mini_batch_size=2", "trainer.lead=1", "placement=two_pools")


def costs(repeats: int) -> tuple[float, float]:
    """Return the seconds of a nested and of an outermost span, which is written to the file; medians of ten runs."""
    nested, outermost = [], []
    with tempfile.TemporaryDirectory() as folder, recorded_spans(Path(folder), "main/0"):
        for _ in range(10):
            with span("outer"):
                nested.append(seconds_of_one(repeats))
            outermost.append(seconds_of_one(repeats // 10))
    return statistics.median(nested), statistics.median(outermost)


def seconds_of_one(repeats: int) -> float:
    """Return the seconds of an empty span, the mean of `repeats`."""
    began = time.perf_counter()
    for _ in range(repeats):
        with span("empty"):
            pass
    return (time.perf_counter() - began) / repeats


def main() -> int:
    """Measure, and compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=20000)
    options = parser.parse_args()
    nested_s, outermost_s = costs(options.repeats)
    print(f"a nested span {nested_s * 1e6:.1f} µs, an outermost one {outermost_s * 1e6:.1f} µs")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = options.run_dir
        if run_dir is None:
            run_dir = Path(folder) / "run"
            command = [sys.executable, "-m", "rlpack", "train", *SMALL, f"run_dir={run_dir}"]
            subprocess.run(command, check=True, capture_output=True, timeout=600.0)
        processes = read_spans(run_dir)
    steps = train_steps(processes)
    begin, end = steps[0].begin_us, steps[-1].end_us
    seconds, worst = (end - begin) / 1e6, 0.0
    for one in processes:
        inside = [s for s in one.spans if begin <= s.begin_us <= end]
        outer = sum(s in inside for thread in {s.thread for s in inside} for s in one.outermost(thread))
        share = (outer * outermost_s + (len(inside) - outer) * nested_s) / seconds
        worst = max(worst, share)
        print(f"{one.process}: {len(inside)} spans in {len(steps)} steps, {share:.2%} of their {seconds:.2f} s")
    print(f"at most {worst:.2%} (at most {BAR:.0%})")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
