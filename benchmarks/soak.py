"""A long run that loses a stateless role every few steps, compared with an undisturbed one.

    python -m benchmarks.soak [--steps 1000] [--every 20] [--seed 0] [--write FILE]

A random rank of a role with its own pool is killed at a random phase of every 20th step. The run has to end with
the records and weights of the undisturbed one, bit for bit, and what its processes hold must not grow: resident memory
of the driver, of the actor's ranks and of the whole run, open files, and shared memory, by linear regression after the
first 100 steps (or the first tenth, of a short run). The other ranks are new after each fault. Files of Ray's log
monitor don't count: it keeps the two log files of each process that ended open, until it has 1,000.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from tests.end_to_end.commands import Command, records
from tests.faults.runs import fired, is_same, restarts_of, settings, started
from tests.faults.table import Case, cases

# Growth per 1,000 steps that counts as none: rounding of pages, and arenas of the allocator that fill up.
MOST_BYTES, MOST_NUMBER = 64e6, 16.0
_WARM_UP = 100
# Phases that not every step has.
_NOT_IN_ALL = ("start", "checkpoint", "evaluation")
_INTERVAL_S = 1.0
_LONGEST_S = 86400.0


def plan(steps: int, every: int, seed: int) -> list[dict[str, object]]:
    """Return a kill of a stateless role at every `every`-th step, roles in turn, phases at random."""
    draw = np.random.default_rng(seed)
    kills = [
        one for one in cases() if (one.outcome, one.fault) == ("repeated", "kill") and one.phase not in _NOT_IN_ALL
    ]
    roles = list(dict.fromkeys(case.role for case in kills))
    chosen = []
    for number, step in enumerate(range(every, steps, every)):
        own: list[Case] = [case for case in kills if case.role == roles[number % len(roles)]]
        chosen.append(own[int(draw.integers(len(own)))].planned(step))
    return chosen


def sample(command: Command) -> dict[str, float]:
    """Return what the processes of a run hold now."""
    held = {"driver_bytes": 0.0, "actor_bytes": 0.0, "all_bytes": 0.0, "files": 0.0, "processes": 0.0}
    for process in command.processes():
        try:
            memory, files, title = process.memory_info().rss, process.num_fds(), " ".join(process.cmdline())
        except psutil.Error:  # it ended meanwhile
            continue
        held["all_bytes"] += memory
        if process.name() == "raylet":  # which maps the object store
            held["shared_bytes"] = float(process.memory_info().shared)
        held["files"] += 0 if "log_monitor.py" in title else files
        held["processes"] += 1
        if command.process is not None and process.pid == command.process.pid:
            held["driver_bytes"] = memory
            held["driver_files"] = files
        if "RankActor" in title:
            held["actor_bytes"] = max(held["actor_bytes"], memory)
    return held


def watched(folder: Path, faults: Sequence[dict[str, object]], steps: int) -> list[dict[str, float]]:
    """Run to the end, and return what its processes held, with the step."""
    overrides = (*settings("own pools", steps), "evaluation.every=50", "checkpoint.every=50")
    samples: list[dict[str, float]] = []
    end = time.monotonic() + _LONGEST_S
    with started(folder, faults, overrides) as command:
        assert command.process is not None
        while command.process.exitcode is None and time.monotonic() < end:
            command.process.join(_INTERVAL_S)
            done = [record["step"] for record in records(folder / "run") if record["phase"] == "train"]
            if done:
                samples.append(sample(command) | {"step": float(done[-1])})
        assert command.process.exitcode == 0, command.err[-5000:]
        assert command.left_behind(10.0) == []
    return samples


def growth(samples: Sequence[dict[str, float]], steps: int) -> dict[str, float]:
    """Return the growth of each quantity per 1,000 steps, by linear regression over the steps after the warm-up."""
    first = min(_WARM_UP, steps // 10)
    most: dict[float, dict[str, float]] = {}  # of each step: ranks are missing while they are started again
    for one in samples:
        if first < one["step"] < steps:
            of_step = most.setdefault(one["step"], {})
            most[one["step"]] = of_step | {name: max(value, of_step.get(name, 0.0)) for name, value in one.items()}
    names = sorted(set().union(*most.values()) - {"step"})
    return {
        name: 1000 * float(np.polyfit(list(most), [one.get(name, 0.0) for one in most.values()], 1)[0])
        for name in names
    }


def main(arguments: Sequence[str]) -> int:
    """Run both, print the findings, and return 1 if the bits differ or something grows."""
    parser = argparse.ArgumentParser(description="A long run with faults.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a JSON file for the findings and samples")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak") as place:
        folder, whole = Path(place) / "faults", Path(place) / "undisturbed"
        began = time.monotonic()
        samples = watched(folder, plan(options.steps, options.every, options.seed), options.steps)
        took = time.monotonic() - began
        undisturbed = watched(whole, [], options.steps)
        same = is_same(folder / "run", whole / "run")
        grown, without = growth(samples, options.steps), growth(undisturbed, options.steps)
        findings = {
            "steps": options.steps,
            "faults": len(fired(folder)),
            "restarts": restarts_of(folder / "run"),
            "seconds": took,
            "restart_s": sum(record.get("time/restart_s", 0.0) for record in records(folder / "run")),
            "same_bits": same,
            "growth_per_1000_steps": grown,
            "growth_without_faults": without,
        }
    sys.stdout.write(json.dumps(findings, indent=1) + "\n")
    if options.write is not None:
        options.write.write_text(json.dumps(findings | {"samples": samples}, indent=1))
    too_much = [name for name, rate in grown.items() if rate > (MOST_BYTES if name.endswith("bytes") else MOST_NUMBER)]
    sys.stdout.write(f"bits {'equal' if same else 'DIFFER'}; growing: {', '.join(too_much) or 'nothing'}\n")
    return int(not same or bool(too_much))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
