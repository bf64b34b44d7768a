"""The memory that a dry run estimates, against that of PyTorch's allocator on a GPU."""

import pytest
import torch

from benchmarks.memory_estimate import SETTINGS, Size, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = Size(hidden=1024, layers=12, tokens=8192, device="cuda")


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.ranks == 1])
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(name: str):
    peak = compare(name, SIZE)
    assert peak["estimate"] == pytest.approx(peak["measured"], rel=0.1)
