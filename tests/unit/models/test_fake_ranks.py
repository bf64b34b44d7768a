"""One rank of many without the others: what its thread leaves to other threads."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlpack.models.fake_ranks import call_on_fake_rank


def test_the_first_fake_tensors_of_a_process_belong_to_a_thread_that_stays(monkeypatch: pytest.MonkeyPatch):
    """PyTorch for CUDA without a GPU frees a device guard with that thread, and crashes in the next one."""
    threads: list[threading.Thread] = []
    enter = FakeTensorMode.__enter__

    def recorded(mode: FakeTensorMode) -> FakeTensorMode:
        threads.append(threading.current_thread())
        return enter(mode)

    def use_fake_tensors() -> None:
        with FakeTensorMode():
            torch.ones(3)

    monkeypatch.setattr(FakeTensorMode, "__enter__", recorded)
    for rank in range(2):
        call_on_fake_rank(rank, 2, use_fake_tensors)
    assert threads[0] is threading.main_thread()
