"""Time steps with and without `trainer.lead`, on two cores, with responses of skewed lengths.

    python -m benchmarks.ahead [--repeats 3] [--steps 8] [--mini-batches 4]

A random model over 26 tokens writes responses of 25 tokens in the mean and at most 128, so most of generation waits for
its longest responses. Three ways take turns: two ranks that generate and train in turns, one rank for each without a
lead, and one rank for each with a lead of one step. A run's figure is the median of its steps but the first two and the
last. `--mini-batches` is the number of optimizer steps of a batch; with 1, training skips the pass over old log-probs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.trl_grpo import ROOT, write_inputs

DEADLINE_S = 600.0
WAYS = {
    "two ranks in turns": ("placement=cpu",),
    "a rank for each, lead 0": ("placement=two_pools",),
    "a rank for each, lead 1": ("placement=two_pools", "trainer.lead=1"),
}


class Step(NamedTuple):
    """Medians of a run's steps, in seconds."""

    whole: float
    generation: float
    drain: float


def run(folder: Path, overrides: tuple[str, ...], steps: int, mini_batches: int) -> Step:
    """Run `rlpack train` and return its medians."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    command = [
        *(sys.executable, "-m", "rlpack", "train", f"run_dir={run_dir}", *overrides),
        *("model=pretrained", f"model.path={folder}/model", "data=jsonl", f"data.source={folder}/prompts.jsonl"),
        *(f"data.validation_source={folder}/held_out.jsonl", f"trainer.steps={steps}"),
        *("reward.function=benchmarks.trl_grpo:vowels", "rollout.max_new_tokens=128", "evaluation.every=1000"),
        *("evaluation.samples=1", "checkpoint.every=1000", f"trainer.mini_batch_size={256 // mini_batches}"),
        "actor.optimizer.learning_rate=1e-12",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    taken = [record for record in records if record["phase"] == "train"][2:-1]
    medians = (
        statistics.median(one.get(f"time/{name}_s", 0.0) for one in taken) for name in ("step", "generate", "drain")
    )
    return Step(*medians)


def main() -> int:
    """Alternate the three ways, and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=4, choices=(1, 2, 4))
    options = parser.parse_args()
    found: dict[str, list[Step]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), "skewed")
        for _ in range(options.repeats):
            for way, overrides in WAYS.items():
                found[way].append(run(Path(name), overrides, options.steps, options.mini_batches))
                print(f"{way}: {found[way][-1].whole:.2f} s", flush=True)
    seconds = {way: statistics.median(step.whole for step in steps) for way, steps in found.items()}
    for way, steps in found.items():
        generation, drain = (
            statistics.median(getattr(step, part) for step in steps) for part in ("generation", "drain")
        )
        print(f"{way:26}{seconds[way]:7.2f} s a step, {generation:.2f} s generation, {drain:.2f} s waiting for it")
    turns, apart, lead = seconds.values()
    print(f"lead 1 against lead 0 on the same ranks {apart / lead:.2f}, against two ranks in turns {turns / lead:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
