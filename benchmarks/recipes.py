"""Let each recipe learn the built-in task on the CPU, and compare where they end with GRPO.

    python -m benchmarks.recipes [--seed 1] [--recipes grpo,ppo,dapo]

Prints the held-out sampled accuracy before and after, and the time of the run with its warm-up. A recipe that ends at
0.75 or below, more than 0.05 under GRPO, or takes more than 4 minutes, is marked MISSED, and the exit code is 1.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

RECIPES = (
    "grpo",
    "ppo",
    "dapo",
    "gspo",
    "rloo",
    "reinforce_plus_plus",
    "remax",
    "dr_grpo",
    "cispo",
    "sapo",
    "opo",
    "gmpo",
)
LEAST, BEHIND, LONGEST_S = 0.75, 0.05, 240.0
# A hung run is no result either.
DEADLINE_S = 1800.0


class Ending(NamedTuple):
    """Held-out accuracy before and after, and the run's seconds."""

    before: float
    after: float
    seconds: float


def main() -> int:
    """Run the recipes one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    arguments = parser.parse_args()
    print(f"{'recipe':22}{'before':>8}{'after':>8}{'seconds':>9}")
    endings: dict[str, Ending] = {}
    missed = False
    for recipe in arguments.recipes.split(","):
        endings[recipe] = ending = learn(recipe, arguments.seed)
        behind = "grpo" in endings and ending.after < endings["grpo"].after - BEHIND
        failed = ending.after <= LEAST or behind or ending.seconds > LONGEST_S
        missed |= failed
        note = "  MISSED" if failed else ""
        print(f"{recipe:22}{ending.before:8.3f}{ending.after:8.3f}{ending.seconds:9.1f}{note}", flush=True)
    return int(missed)


def learn(recipe: str, seed: int) -> Ending:
    """Run one recipe with its presets, and read its records."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, "-m", "rlpack", "train", f"recipe={recipe}", f"seed={seed}", f"run_dir={folder}/run"]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
        seconds = time.perf_counter() - began
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    name = "evaluation/reward_sampled"
    curve = [record[name] for record in map(json.loads, lines) if name in record]
    return Ending(curve[0], curve[-1], seconds)


if __name__ == "__main__":
    sys.exit(main())
