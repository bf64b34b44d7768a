"""Exchanges between stages whose sends wait for the receiver, as the first message of two ranks does with NCCL."""

import queue
import threading
from typing import Any

import torch
from torch import Tensor

from rlpack.models.stage_link import StageLink


class Meeting:
    """Sends of two ranks in groups by name; each waits until the other rank receives."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], queue.Queue[Tensor]] = {}
        self._taken: dict[tuple[str, int], threading.Semaphore] = {}
        for group in ("forward", "backward"):
            for stage in (0, 3):
                self._sent[group, stage] = queue.Queue()
                self._taken[group, stage] = threading.Semaphore(0)

    def post(self, tensor: Tensor, stage: int, group: Any) -> None:
        self._sent[group, stage].put(tensor)
        assert self._taken[group, stage].acquire(timeout=5.0), "both ranks send and none receives"

    def fetch_as(self, rank: int, tensor: Tensor, group: Any) -> Tensor:
        tensor.copy_(self._sent[group, rank].get(timeout=5.0))
        self._taken[group, rank].release()
        return tensor


def link_of(rank: int, meeting: Meeting) -> StageLink:
    """Return the link of a stage of four without process groups."""
    link: Any = StageLink.__new__(StageLink)
    link.rank, link.num_stages, link.num_virtual = rank, 4, 1
    link._device, link._forward, link._backward = torch.device("cpu"), "forward", "backward"
    link._post = meeting.post
    link._fetch = lambda tensor, stage, group: meeting.fetch_as(rank, tensor, group)
    return link


def test_the_first_and_the_last_stage_add_tied_gradients_even_if_sends_wait():
    meeting, gradients = Meeting(), [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    links = [link_of(rank, meeting) for rank in (0, 3)]
    ends = [
        threading.Thread(target=link.add_other_end, args=(gradient,), daemon=True)
        for link, gradient in zip(links, gradients, strict=True)
    ]
    for end in ends:
        end.start()
    for end in ends:
        end.join(20.0)
    assert [gradient.tolist() for gradient in gradients] == [[11.0, 22.0], [11.0, 22.0]]
