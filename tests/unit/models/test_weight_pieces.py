from math import prod

import pytest
import torch

from rlpack.models.weight_pieces import Cuts, PiecePlan, place_shape, sizes

CUTS: list[Cuts] = [(), ((0, 3),), ((1, 2),), ((1, 2), (0, 2)), ((0, 2), (0, 3)), ((0, 2), (1, 3), (0, 2))]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("shape", [(7, 5), (1, 6), (8, 3, 4), (2, 2)])
def test_places_cover_a_weight_once_and_blocks_are_those_of_chunk(shape: tuple[int, ...], cuts: Cuts):
    weight = torch.arange(prod(shape)).reshape(shape)
    for piece_bytes in (1, 100, 1000):
        plan = PiecePlan.of(shape, 8, cuts, piece_bytes)
        counts = torch.zeros(shape)
        for place in plan.places:
            counts[place] += 1
            assert counts[place].shape == place_shape(shape, place)
        assert bool((counts == 1).all())
        parts = [weight]
        for axis, ranks in cuts:  # the last mesh dimension outside
            chunks = [part.chunk(ranks, axis) for part in parts]
            empty = [part.narrow(axis, 0, 0) for part in parts]
            parts = [
                pieces[rank] if rank < len(pieces) else none
                for rank in range(ranks)
                for pieces, none in zip(chunks, empty, strict=True)
            ]
        assert [weight[block].flatten().tolist() for block in plan.blocks] == [
            part.flatten().tolist() for part in parts
        ]


def test_a_step_gathers_no_more_than_allowed_and_joins_whole_rows():
    plan = PiecePlan.of((64, 32), 4, ((1, 2), (0, 2)), 1024)
    for step in plan.steps:
        assert len(plan.blocks) * prod(place_shape(plan.block_shape, step.piece)) * 4 <= 1024
        # Of four blocks, the two that are side by side fill rows together.
        assert [len(members) for _, members in step.places] == [2, 2]
        assert all(len(place) == 1 and sizes(place) == sizes(step.piece) for place, _ in step.places)
