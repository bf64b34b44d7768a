"""Check that ranks on other nodes see a folder of the driver, such as the run directory.

A resumed run would not find files that are written elsewhere.
"""

import secrets
import time
from pathlib import Path

import ray

from rlpack.distributed.errors import PlacementError
from rlpack.distributed.ranks import RayRanks

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
    here = ray.get_runtime_context().get_node_id()
    if all(node == here for node in ranks.nodes):
        return
    token = secrets.token_hex(8)
    marker = folder / f".shared-{token}"
    marker.write_text(token)
    try:
        blind = sorted({node for node in ranks.apply(_node_without, marker, token).result() if node is not None})
    finally:
        marker.unlink(missing_ok=True)
    if blind:
        subject = f"node {blind[0]} does" if len(blind) == 1 else f"nodes {', '.join(blind)} do"
        raise PlacementError(
            f"{subject} not share {key} with the driver: ranks of pool {pool} there don't see a file that the driver "
            f"wrote in {folder}, so {effect}; set {key} to a folder on storage that all nodes mount at the same path"
        )


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
