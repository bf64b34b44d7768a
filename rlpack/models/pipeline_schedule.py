"""The order in which a pipeline rank runs forward and backward passes.

With V = 1, each of the P ranks is one stage of the pipeline. With V above 1, a rank has V virtual stages: stage s of
P · V is virtual stage s // P of rank s mod P, and the last rank sends hidden states to the first one. A pass then takes
1/V of the time, and so does the filling and draining of the pipeline, P - 1 passes in each direction. The time in which
a rank waits, relative to the time of M microbatches, is (P - 1) / (V · M).

**No schedule deadlocks.** Let k count the forward passes of a rank from 0, and likewise its backward passes. With V
above 1, rank r runs w(r) = 2 (P - r - 1) + (V - 1) P forward passes, or all if there are fewer; afterwards the
directions alternate, forward first. Number forward pass k of rank r with 2 (k + r), and backward pass k with
2 (k - r) + c, where c = 4 (P - 1) + 2 (V - 1) P + 1 = 2 w(r) + 4 r + 1. Every pass then has a larger number than all
that it waits for:

- The pass before it on the same rank. Forward pass k + w(r) has the number 2 (k - r) + c - 1, backward pass k one more,
  and forward pass k + w(r) + 1 one more again.
- Hidden states. They are those of forward pass k of rank r - 1. On the first rank, they are those of forward pass k - P
  of the last rank, because the next virtual stage of a microbatch comes P passes later.
- Gradients. They are those of backward pass k of rank r + 1; on the last rank, of backward pass k - P of the first one.

Hidden states or gradients from one rank to another are a channel. Both ends count in the same order, so messages are
received in the order in which they were sent. A sender waits while more than P of a channel's messages have not been
received. The message before the last one is received at the start of a pass whose number is not larger than that of the
pass that sends the last one, so a limit of one message would do. With V = 1, w(r) = P - r - 1, and the numbers are
2 k + r and 2 k - r + 2 P - 1.

Passes without gradients run in groups of at most P microbatches: all of a group on virtual stage 0, then all on virtual
stage 1, and so on. A pass waits for one of an earlier virtual stage or, in the same one, of a smaller rank. The
messages of a channel before the last P belong to earlier virtual stages or microbatches, so no sender waits for its own
pass.

Ranks that share rows or weights run the same schedule in lock step, and count as one here.

Source: Narayanan et al. 2019, PipeDream, doi:10.1145/3341301.3359646; flushed at each step, and interleaved, as in
Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class PipelinePlace(Protocol):
    """The place of a rank in a pipeline.

    Attributes:
        rank: index of this rank, from 0.
        num_stages: ranks of the pipeline.
        num_virtual: virtual stages of each rank.
    """

    rank: int
    num_stages: int
    num_virtual: int


class Turn(NamedTuple):
    """A forward or backward pass of a microbatch through a virtual stage of this rank, both counted from 0."""

    direction: Literal["forward", "backward"]
    microbatch: int
    virtual: int = 0


def pipeline_turns(microbatches: int, place: PipelinePlace | None) -> Iterator[Turn]:
    """Yield the passes of an optimizer step in the order of one rank: one forward, one backward (1F1B).

    A rank first runs forward passes until the first gradient can have arrived. It holds their activations, and those of
    one more pass. Without stages, each forward pass is followed by its backward pass.

    Args:
        microbatches: number of microbatches of the step; with virtual stages, divisible by the number of ranks.
        place: place of this rank; None without stages.
    """
    rank, num_stages, num_virtual = (0, 1, 1) if place is None else (place.rank, place.num_stages, place.num_virtual)
    behind, passes = num_stages - rank - 1, microbatches * num_virtual
    ahead = min(behind if num_virtual == 1 else 2 * behind + (num_virtual - 1) * num_stages, passes)
    assert num_virtual == 1 or microbatches % num_stages == 0, "the plan's divisible_by is the number of stages"

    def turn(direction: Literal["forward", "backward"], number: int) -> Turn:
        if num_virtual == 1:
            return Turn(direction, number)
        group, within = divmod(number, num_stages * num_virtual)
        virtual, offset = divmod(within, num_stages)
        virtual = virtual if direction == "forward" else num_virtual - 1 - virtual
        return Turn(direction, group * num_stages + offset, virtual)

    for number in range(ahead):
        yield turn("forward", number)
    for number in range(passes):
        if number + ahead < passes:
            yield turn("forward", number + ahead)
        yield turn("backward", number)


def forward_turns(microbatches: Iterable[T], place: PipelinePlace | None) -> Iterator[tuple[T, int]]:
    """Yield microbatches and virtual stages in the order of passes without gradients.

    On the last virtual stage, microbatches keep their order. A rank that has sent a microbatch continues with the next
    one, so without virtual stages every rank keeps it.

    >>> from types import SimpleNamespace
    >>> list(forward_turns("abc", SimpleNamespace(rank=0, num_stages=2, num_virtual=2)))
    [('a', 0), ('b', 0), ('a', 1), ('b', 1), ('c', 0), ('c', 1)]
    """
    num_virtual = 1 if place is None else place.num_virtual
    size = 1 if place is None or num_virtual == 1 else place.num_stages
    remaining = iter(microbatches)
    while group := list(islice(remaining, size)):
        for virtual in range(num_virtual):
            for microbatch in group:
                yield microbatch, virtual
