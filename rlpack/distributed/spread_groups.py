"""A warning for parallel groups whose ranks are on several nodes: each layer then waits for the network."""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlpack.distributed.layout import ParallelLayout

logger = logging.getLogger(__name__)

# Digits of a node's id in messages, enough to find it in Ray's lists.
_ID_DIGITS = 12


def warn_of_spread_groups(
    layouts: Mapping[str, ParallelLayout], pool_of: Mapping[str, str], nodes_of: Mapping[str, Sequence[str]]
) -> None:
    """Warn of tp, cp and ep groups that span nodes, once for each pool and size.

    Args:
        layouts: the layout of each role.
        pool_of: the pool of each role.
        nodes_of: Ray's id of the node of each rank, by pool.
    """
    reported: set[tuple[str, str, int]] = set()
    for role, layout in layouts.items():
        pool = pool_of[role]
        nodes = nodes_of[pool]
        for dimension, groups in _groups(layout):
            spread = [group for group in groups if len({nodes[rank] for rank in group}) > 1]
            key = (pool, dimension, len(groups[0]))
            if not spread or key in reported:
                continue
            reported.add(key)
            names = sorted({nodes[rank][:_ID_DIGITS] for rank in spread[0]})
            logger.warning(
                "pool %s: %d of the %d %s groups of role %s span nodes, such as ranks %s on nodes %s, so that each "
                "layer waits for the network; lower %s.parallel.%s (%d), or start the run when whole nodes are free",
                *(pool, len(spread), len(groups), dimension, role, ", ".join(map(str, spread[0])), ", ".join(names)),
                *(role, dimension, len(groups[0])),
            )


def _groups(layout: ParallelLayout) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each dimension whose ranks exchange data in every layer, if larger than 1, and the ranks of its groups."""
    ranks = np.arange(layout.world_size)
    experts = ranks.reshape(-1, layout.ep, layout.tp)  # ep consecutive ones of dp_shard · cp ranks
    rows = ranks.reshape(-1, layout.cp, layout.tp)
    for dimension, size, groups in (
        ("tp", layout.tp, ranks.reshape(-1, layout.tp)),
        ("cp", layout.cp, rows.swapaxes(1, 2).reshape(-1, layout.cp)),
        ("ep", layout.ep, experts.swapaxes(1, 2).reshape(-1, layout.ep)),
    ):
        if size > 1:
            yield dimension, groups.tolist()
