"""The memory that a dry run estimates, against what PyTorch's allocator reports of real training steps."""

import os

import pytest

from benchmarks.memory_estimate import Size, compare

SIZE = Size(hidden=512, layers=8, tokens=512)
# A quarter of a minute each. `make test-long` runs the others.
NAMES = {"lora", "dp2"}


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *((name, 0.02) for name in ("fp32", "selective", "full", "lora", "bf16", "two microbatches")),
        *((name, 0.02) for name in ("critic", "qwen3_moe")),
        # gloo has buffers of its own for what ranks exchange.
        *((name, 0.1) for name in ("dp2", "hsdp 2x2", "tp2", "cp2", "cp2, all_gather", "pp2", "pp2, vpp2")),
        *((name, 0.1) for name in ("ep2, qwen3_moe", "critic, dp2")),
    ],
)
def test_the_estimate_is_the_measured_peak(name: str, tolerance: float):
    if name not in NAMES and not os.environ.get("RLPACK_MEMORY"):
        pytest.skip("runs in `make test-long`")
    peak = compare(name, SIZE)
    assert peak["estimate"] == pytest.approx(peak["measured"], rel=tolerance)
