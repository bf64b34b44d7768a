"""The gloo backend with one thread per group."""

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from rlpack.gloo import GLOO


def test_a_group_has_one_thread_and_its_timeout_and_gathers(tmp_path: Path):
    store, timeout = f"file://{tmp_path}/store", timedelta(seconds=7)
    dist.init_process_group(GLOO, init_method=store, rank=0, world_size=1, timeout=timeout)
    try:
        for group in (dist.group.WORLD, dist.new_group(timeout=timeout)):
            options = cast(Any, group)._get_backend(torch.device("cpu")).options
            assert (options._threads, options._timeout) == (1, timeout)
            gathered = [torch.zeros(3)]
            dist.all_gather(gathered, torch.ones(3), group=cast(Any, group))
            assert gathered[0].tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()
