import math

import pytest

from rlpack.config.schema import Config, Placement, Pool
from rlpack.distributed.errors import PlacementError
from rlpack.startup.pool_checks import check_machine, most_gpus


def config(**pool):
    return Config(placement=Placement(pools={"main": Pool(**pool)}))


def test_pools_are_held_against_the_gpus_of_this_machine():
    check_machine(config(ranks=2, gpus_per_rank=1.0), 2)
    check_machine(config(ranks=2, gpus_per_rank=1.0), math.inf)
    with pytest.raises(PlacementError, match="ask for 2 GPU, but this machine has 1"):
        check_machine(config(ranks=2, gpus_per_rank=1.0), 1)
    with pytest.raises(PlacementError, match="need 100,000 CPUs"):
        check_machine(config(ranks=100_000), 0)


def test_gpus_that_cannot_be_counted_are_left_to_pytorch(tmp_path, monkeypatch):
    (tmp_path / "kfd").touch()
    assert most_gpus(tmp_path) == math.inf
    (tmp_path / "kfd").unlink()
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)  # a driver
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert most_gpus(tmp_path) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert most_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert most_gpus(tmp_path) == 0


def test_without_a_driver_there_is_no_gpu(tmp_path, monkeypatch):
    def fail(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", fail)
    (tmp_path / "nvidia0").touch()
    assert most_gpus(tmp_path) == 0
