"""Compare runs of two commits, metric by metric and weight by weight.

    python -m benchmarks.compare_runs OLD NEW [--tolerance 1e-6]

OLD and NEW are run directories, or folders of run directories with the same names. The metrics of OLD may have the
names of commit b99bad4 or later (`RENAMED`). Times, throughput and peak memory are left out. Prints one line for each
pair of runs: the number of records, metrics and weights that were compared, and the largest difference. Lists what
differs by more than the tolerance, relative to the larger of 1 and the value. Exits with 1 if anything differs.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

# Names of commit b99bad4 and later ones, and what they are called today.
RENAMED = {
    "prompts_seen": "prompts_consumed",
    "policy_version": "optimizer_steps",
    "packing/fillers": "packing/dummy_microbatches",
    "packing/searches_stopped": "packing/search_limit_hits",
    "packing/bin_utilisation": "packing/bin_utilization",
}
PREFIXES = {"warm_up/": "sft_warmup/", "evaluation/accuracy_": "evaluation/reward_"}
PHASES = {"warm_up": "sft_warmup"}
# Wall-clock figures, rates and memory; what the object store held depends on when objects are freed.
LEFT_OUT = ("time_s", "time/", "throughput/", "perf/", "store/")


def main() -> int:
    """Compare all pairs of runs; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.0)
    arguments = parser.parse_args()
    problems = 0
    runs = pairs(arguments.old, arguments.new)
    if not runs:
        parser.error(f"there are no runs in {arguments.old}")
    for old, new in runs:
        summary, differences = compare(old, new, arguments.tolerance)
        print(f"{new.name:24} {summary}{'' if not differences else f', {len(differences)} DIFFER'}", flush=True)
        for difference in differences[:20]:
            print(f"    {difference}")
        problems += len(differences)
    return int(problems > 0)


def pairs(old: Path, new: Path) -> list[tuple[Path, Path]]:
    """Return the pairs of run directories to compare."""
    if (old / "metrics.jsonl").exists():
        return [(old, new)]
    return [(run.parent, new / run.parent.name) for run in sorted(old.glob("*/metrics.jsonl"))]


def compare(old: Path, new: Path, tolerance: float) -> tuple[str, list[str]]:
    """Return a summary of two runs and what differs between them."""
    before, after = [records(run) for run in (old, new)]
    differences = [] if len(before) == len(after) else [f"{len(before)} records, and {len(after)}"]
    largest, count = 0.0, 0
    for one, other in zip(before, after, strict=False):
        place = f"{other['phase']} step {other['step']}"
        names = sorted(one.keys() - other.keys())
        differences += [f"{place}: {name} is missing" for name in names]
        for name in one.keys() & other.keys():
            gap, count = distance(one[name], other[name]), count + 1
            largest = max(largest, gap)
            if gap > tolerance:
                differences.append(f"{place}: {name} is {other[name]!r}, and was {one[name]!r}")
    weights = list(weight_gaps(old, new))
    differences += [f"weight {name} differs by {gap:g}" for name, gap in weights if gap > tolerance]
    largest_weight = max((gap for _, gap in weights), default=math.nan)
    summary = (
        f"{len(after)} records, {count} figures, largest difference {largest:g}; "
        f"{len(weights)} weights, largest difference {largest_weight:g}"
    )
    return summary, differences


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run under today's names, without what the clock decides."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [_renamed(json.loads(line)) for line in lines]


def distance(one: Any, other: Any) -> float:
    """Return the difference of two figures, relative to the larger of 1 and their size; 0 if they are the same."""
    if one == other or (one != one and other != other):
        return 0.0
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return math.inf
    gap = abs(one - other) / max(1.0, abs(one), abs(other))
    return math.inf if math.isnan(gap) else gap


def weight_gaps(old: Path, new: Path) -> Iterator[tuple[str, float]]:
    """Yield each exported weight with the largest difference of its entries."""
    before, after = [load_file(run / "model" / "model.safetensors") for run in (old, new)]
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after or before[name].shape != after[name].shape:
            yield name, math.inf
        else:
            gap = float(abs(before[name].astype("f8") - after[name].astype("f8")).max(initial=0.0))
            yield name, math.inf if math.isnan(gap) else gap


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    compared = {_name(name): value for name, value in record.items() if not name.startswith(LEFT_OUT)}
    if "prompts_consumed" not in compared and "prompts_trained" in compared:  # which counted all drawn prompts before
        compared["prompts_consumed"] = compared.pop("prompts_trained")
    return compared | {"phase": PHASES.get(record["phase"], record["phase"])}


def _name(name: str) -> str:
    for old, new in PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return RENAMED.get(name, name)


if __name__ == "__main__":
    sys.exit(main())
