"""A process group of this process alone, for roles that shard their model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """Join a gloo group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
