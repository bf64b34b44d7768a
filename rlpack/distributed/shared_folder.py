"""Check that ranks on other nodes see a folder of the driver, such as the run directory.

A resumed run would not find files that are written elsewhere, and the report and the trace lack what is recorded there.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import ray

from rlpack.distributed.errors import PlacementError
from rlpack.distributed.ranks import RayRanks

logger = logging.getLogger(__name__)

# A network file system may show a new file to other machines with a delay.
_WAIT_S, _POLL_S = 5.0, 0.2


def check_shared(
    pool: str,
    ranks: RayRanks,
    folder: Path,
    *,
    key: str = "run_dir",
    effect: str = "the run's checkpoints would be incomplete",
) -> None:
    """Raise unless all ranks of a pool see `folder` as the driver does; ranks on the driver's node always do.

    The driver writes a small file to it, which ranks on other nodes read; then it is removed.

    Args:
        pool: name of the pool.
        ranks: its ranks.
        folder: where the file is written.
        key: the setting that the folder follows from, for the error.
        effect: what a node that doesn't share the folder causes, for the error.

    Raises:
        PlacementError: a rank does not find the file; names the node.
        RoleError: a rank died, or did not answer by its deadline.
    """
    if blind := _blind_nodes({pool: ranks}, folder).get(pool):
        raise PlacementError(
            f"{_nodes_do(blind)} not share {key} with the driver: ranks of pool {pool} there don't see a file that the "
            f"driver wrote in {folder}, so {effect}; set {key} to a folder on storage that all nodes mount at the same "
            "path"
        )


def warn_of_lost_records(pools: Mapping[str, RayRanks], folder: Path) -> None:
    """Log a warning if ranks don't see the folder in which they would write their logs and spans.

    Args:
        pools: ranks by the name of their pool.
        folder: the run's directory.

    Raises:
        RoleError: a rank died, or did not answer by its deadline.
    """
    blind = _blind_nodes(pools, folder)
    if blind:
        nodes = sorted({node for found in blind.values() for node in found})
        names = f"pool {next(iter(blind))}" if len(blind) == 1 else f"pools {', '.join(blind)}"
        logger.warning(
            "%s not share the run's directory %s with the driver: the logs and spans of the ranks of %s there are "
            "lost, so no report, trace or forecast has them; use a folder on storage that all nodes mount at the same "
            "path",
            *(_nodes_do(nodes), folder, names),
        )


def _nodes_do(nodes: list[str]) -> str:
    """Return the subject of a sentence about nodes, with its verb."""
    return f"node {nodes[0]} does" if len(nodes) == 1 else f"nodes {', '.join(nodes)} do"


def _blind_nodes(pools: Mapping[str, RayRanks], folder: Path) -> dict[str, list[str]]:
    """Return the addresses of nodes on which ranks don't see `folder` as the driver does, by pool."""
    here = ray.get_runtime_context().get_node_id()
    elsewhere = {name: ranks for name, ranks in pools.items() if any(node != here for node in ranks.nodes)}
    if not elsewhere:
        return {}
    token = secrets.token_hex(8)
    marker = folder / f".shared-{token}"
    marker.write_text(token)
    try:
        answers = {name: ranks.apply(_node_without, marker, token) for name, ranks in elsewhere.items()}
        found = {name: {node for node in answer.result() if node is not None} for name, answer in answers.items()}
    finally:
        marker.unlink(missing_ok=True)
    return {name: sorted(nodes) for name, nodes in found.items() if nodes}


def _node_without(marker: Path, token: str) -> str | None:
    """Return the address of this rank's node if it has no such file with this content, else None."""
    deadline = time.monotonic() + _WAIT_S
    while not _has(marker, token):
        if time.monotonic() > deadline:
            return ray.util.get_node_ip_address()
        time.sleep(_POLL_S)
    return None


def _has(marker: Path, token: str) -> bool:
    try:
        return marker.read_text() == token
    except OSError:
        return False
