"""A plan is the same in every process, with Numba and without."""

import os
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest

import rlpack
from rlpack.packing import Batching, Cost, make_plan
from rlpack.packing.analysis.traces import trace


def fingerprint() -> int:
    """Return a checksum of plans that run every compiled loop."""
    checksum = 0
    for name in ("zipf", "bimodal", "triplets", "johnson"):
        lengths = trace(name, 90, longest=100, seed=1)
        for batching in (
            Batching(max_tokens=200, algorithm="optimal", divisible_by=2),
            Batching(max_tokens=200, pad_to_multiple=4, min_microbatches=9),
            Batching(max_tokens=200, algorithm="modified_first_fit_decreasing"),
            Batching(mode="dynamic", max_tokens=300, length_multiple=2),
            Batching(mode="fixed", micro_batch_size=3),
        ):
            plan = make_plan(lengths, batching, dp_size=3, mini_batch_size=45, cost=Cost(1.0, 0.01))
            for array in (plan.order, plan.counts, plan.padded_lengths, plan.step_bounds):
                checksum = crc32(array.tobytes(), checksum)
    return checksum


@pytest.mark.parametrize("environment", [{"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "8", "NUMBA_DISABLE_JIT": "1"}])
def test_a_plan_is_the_same_in_every_process(environment: dict[str, str]) -> None:
    root = str(Path(rlpack.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import {__name__} as here; print(here.fingerprint())"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": root} | environment,
    )
    assert result.stdout.strip() == str(fingerprint()), result.stderr
