"""What holds for every unit test: none starts Ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from rlpack.gloo import GLOO


@pytest.fixture(autouse=True)
def _no_ray(no_ray: None) -> None:
    """Leave Ray to the recipe, which unit tests replace."""


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """Join a gloo group of this process alone, for roles that shard their model."""
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
