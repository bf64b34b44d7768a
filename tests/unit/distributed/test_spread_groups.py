import logging

import pytest

from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.spread_groups import warn_of_spread_groups

A, B = "a" * 56, "b" * 56


def warnings(caplog: pytest.LogCaptureFixture, layouts: dict[str, ParallelLayout], nodes: list[str]) -> list[str]:
    caplog.set_level(logging.WARNING)
    warn_of_spread_groups(layouts, dict.fromkeys(layouts, "main"), {"main": nodes})
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp_shard=8),
        ParallelLayout(pp=2, dp_shard=4),
        ParallelLayout(dp_shard=2, tp=4),
        ParallelLayout(dp_replicate=2, cp=2, tp=2),
        ParallelLayout(dp_shard=4, tp=2, ep=2),
    ],
)
def test_groups_within_nodes_are_not_reported(layout: ParallelLayout, caplog: pytest.LogCaptureFixture):
    assert warnings(caplog, {"actor": layout}, [A] * 4 + [B] * 4) == []


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (ParallelLayout(tp=8), r"1 of the 1 tp groups of role actor span nodes, such as ranks 0, 1, 2, 3, 4, 5, 6, 7 "),
        (ParallelLayout(dp_shard=2, tp=4), r"1 of the 2 tp groups of role actor span nodes, such as ranks 4, 5, 6, 7 "),
        (ParallelLayout(cp=4, tp=2), r"2 of the 2 cp groups of role actor span nodes, such as ranks 0, 2, 4, 6 "),
        (ParallelLayout(dp_shard=4, tp=2, ep=4), r"2 of the 2 ep groups of role actor span nodes, such as ranks 0, 2"),
    ],
)
def test_a_group_that_spans_nodes_is_reported(layout: ParallelLayout, said: str, caplog: pytest.LogCaptureFixture):
    (warning,) = warnings(caplog, {"actor": layout}, [A] * 6 + [B] * 2)
    assert warning.startswith(f"pool main: {said}")
    assert f"on nodes {A[:12]}, {B[:12]}, so that each layer waits for the network; lower actor.parallel." in warning


def test_roles_with_one_layout_in_a_pool_are_reported_once(caplog: pytest.LogCaptureFixture):
    layout = ParallelLayout(tp=4)
    (warning,) = warnings(caplog, {"actor": layout, "reference": layout}, [A, A, A, B])
    assert warning.endswith("; lower actor.parallel.tp (4), or start the run when whole nodes are free")
