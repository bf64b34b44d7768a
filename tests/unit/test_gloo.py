"""The gloo backend with one thread per group."""

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
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


def test_beside_a_backend_for_gpus_it_serves_the_cpu(tmp_path: Path):
    store = f"file://{tmp_path}/store"
    dist.init_process_group(f"cpu:{GLOO},cuda:gloo", init_method=store, rank=0, world_size=1)
    try:
        for group in (dist.group.WORLD, dist.new_group()):
            threads = [
                cast(Any, group)._get_backend(torch.device(device)).options._threads for device in ("cpu", "cuda")
            ]
            assert threads == [1, 2]
            total = torch.ones(3)
            dist.all_reduce(total, group=cast(Any, group))
            assert total.tolist() == [1, 1, 1]
        objects: list[Any] = [None]
        dist.all_gather_object(objects, {"rank": 0})
        assert objects == [{"rank": 0}]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("interfaces", "count"), [("lo", 1), ("lo,lo", 2)])
def test_a_group_uses_the_interfaces_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interfaces: str, count: int
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        options = cast(Any, dist.group.WORLD)._get_backend(torch.device("cpu")).options
        assert len(options._devices) == count
    finally:
        dist.destroy_process_group()


def test_an_interface_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "missing0")
        with pytest.raises(RuntimeError, match="missing0"):
            dist.new_group(timeout=timedelta(seconds=7))
    finally:
        # A default group that fails would leave torch's counter of group names at 1. Meshes of later tests in this
        # process would then equal cached ones with other names.
        dist.destroy_process_group()
