"""Check that the ranks that load an exported checkpoint see its folder."""

from pathlib import Path
from typing import cast

from rlpack.config.recipes import recipe_section
from rlpack.config.roles import pool_of
from rlpack.config.schema import Config
from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.shared_folder import check_shared


def check_export_is_shared(cluster: Cluster, config: Config, names: list[str]) -> None:
    """Start the pools of the roles `names`, and check that those of the rollout see the export in `model.path`.

    A model that was not exported may have a copy on each node, or come from the Hub.

    Raises:
        PlacementError: the cluster is too small, or a node does not share `evaluate.output_dir` with the driver.
        RoleError: a rank died, or did not answer by its deadline.
    """
    if recipe_section(config, Evaluate).checkpoint is None:
        return
    pools = cluster.open_pools(list(dict.fromkeys(pool_of(config, name) for name in names)))
    pool = pool_of(config, "rollout")
    folder = Path(cast(str, config.model.path))
    check_shared(pool, pools[pool], folder, key="evaluate.output_dir", effect="they can't load the exported checkpoint")
