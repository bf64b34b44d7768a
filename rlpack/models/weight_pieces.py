"""Pieces in which the ranks that share a large weight gather it, computed identically on every rank.

Each rank has one block of the weight. In a step every rank sends the same piece of its block, and the blocks' pieces
that lie side by side are joined into whole rows.

Invariants (tests/unit/models/test_weight_pieces.py):

1. the places of all steps together cover the weight, and no entry twice;
2. a step gathers at most `piece_bytes`, or one entry of each block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

# Where a piece is: slices along the first axes of a weight, the other axes being whole. () is all of it.
Place = tuple[slice, ...]
# How a weight is cut: axis and number of ranks, by the mesh dimensions that shard it.
Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Step:
    """One step of a gather.

    Attributes:
        piece: the part that each rank sends of its block, as a place in the largest block; a smaller block may have
            less of it.
        places: what arrives, with the blocks that are in each place.
    """

    piece: Place
    places: list[tuple[Place, list[int]]]


@dataclass(frozen=True)
class PiecePlan:
    """The steps that gather one weight.

    Attributes:
        blocks: blocks of all ranks, in the order of the results of nested gathers, with the last mesh dimension
            outermost.
        block_shape: shape of the largest block.
        steps: in order.
    """

    blocks: list[Place]
    block_shape: tuple[int, ...]
    steps: list[Step]

    @classmethod
    def of(cls, shape: Sequence[int], itemsize: int, cuts: Cuts, piece_bytes: int) -> "PiecePlan":
        """Plan the steps for a weight of this shape with entries of `itemsize` bytes."""
        blocks: list[Place] = [tuple(slice(0, size) for size in shape)]
        for axis, ranks in cuts:
            blocks = [_chunk(block, axis, ranks, rank) for rank in range(ranks) for block in blocks]
        block_shape = sizes(blocks[0])  # the first block is the largest one along every axis
        pieces = _pieces(block_shape, piece_bytes // (len(blocks) * itemsize))
        return cls(blocks, block_shape, [Step(piece, list(_places(blocks, piece))) for piece in pieces])

    @property
    def places(self) -> Iterator[Place]:
        """Yield the places in the order in which they arrive."""
        return (place for step in self.steps for place, _ in step.places)


def sizes(place: Place) -> tuple[int, ...]:
    """Return the sizes of a place along the axes that it names."""
    return tuple(axis.stop - axis.start for axis in place)


def place_shape(shape: Sequence[int], place: Place) -> tuple[int, ...]:
    """Return the shape of what is in a place of a weight of this shape.

    >>> place_shape((8, 6, 2), (slice(2, 5),))
    (3, 6, 2)
    """
    return (*sizes(place), *shape[len(place) :])


def part_of(block: Place, piece: Place) -> Place:
    """Return where a piece of a block is in the weight; empty if the block is too small."""
    parts = zip(block, piece, strict=False)
    return tuple(
        slice(min(own.start + part.start, own.stop), min(own.start + part.stop, own.stop)) for own, part in parts
    )


def _places(blocks: list[Place], piece: Place) -> Iterator[tuple[Place, list[int]]]:
    """Yield the non-empty places that the same piece of all blocks fills, with the blocks of each."""
    members: dict[tuple[tuple[int, int], ...], list[int]] = {}
    parts = [part_of(block, piece) + block[len(piece) :] for block in blocks]
    joined = 1 if len(piece) == 1 else None  # blocks with the same rows have whole rows together
    for number, part in enumerate(parts):
        if all(sizes(part)):
            members.setdefault(tuple((axis.start, axis.stop) for axis in part[:joined]), []).append(number)
    for key, numbers in members.items():
        yield tuple(slice(start, stop) for start, stop in key), numbers


def _chunk(block: Place, axis: int, ranks: int, rank: int) -> Place:
    """Return a rank's part of a block along one axis, as `torch.chunk` cuts it."""
    start, stop = block[axis].start, block[axis].stop
    size = -(-(stop - start) // ranks)
    own = slice(min(start + rank * size, stop), min(start + (rank + 1) * size, stop))
    return (*block[:axis], own, *block[axis + 1 :])


def _pieces(shape: Sequence[int], most: int) -> Iterator[Place]:
    """Yield slices of the first axes of a tensor, of at most `most` entries each if a row of the last axis is.

    >>> list(_pieces((3, 2), 4))
    [(slice(0, 2, None),), (slice(2, 3, None),)]
    """
    row = prod(shape[1:])
    if row > most and len(shape) > 1:
        for start in range(shape[0]):
            yield from ((slice(start, start + 1), *others) for others in _pieces(shape[1:], most))
        return
    rows = max(1, most // max(1, row))
    yield from ((slice(start, min(start + rows, shape[0])),) for start in range(0, shape[0], rows))
