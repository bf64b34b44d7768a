"""The memory that a dry run estimates, against what PyTorch's allocator reports of real training steps."""

import pytest

from benchmarks.memory_estimate import Size, compare

SIZE = Size(hidden=512, layers=8, tokens=512)
ON_ONE_RANK = ("fp32", "selective", "full", "lora", "bf16", "two microbatches", "critic", "qwen3_moe")
ON_SEVERAL = ("hsdp 2x2", "tp2", "cp2", "cp2, all_gather", "pp2", "pp2, vpp2", "ep2, qwen3_moe", "critic, dp2")


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("dp2", 0.1),
        *(pytest.param(name, 0.02, marks=pytest.mark.long) for name in ON_ONE_RANK),
        # gloo has buffers of its own for what ranks exchange.
        *(pytest.param(name, 0.1, marks=pytest.mark.long) for name in ON_SEVERAL),
    ],
)
def test_the_estimate_is_the_measured_peak(name: str, tolerance: float):
    peak = compare(name, SIZE)
    assert peak["estimate"] == pytest.approx(peak["measured"], rel=tolerance)
