"""Resource checks: the pools and the object store against this machine, before any rank starts."""

import torch

from rlpack.config.schema import Config
from rlpack.startup.pool_checks import check_machine


def check_resources(config: Config) -> None:
    """Refuse pools and an object store that this machine can't hold.

    With `placement.address` nothing is checked here: the cluster's resources are checked when the pools are reserved.

    Raises:
        PlacementError: the pools need more GPUs than there are or more ranks than a machine of this size can run, or
            the object store needs more memory than is free.
    """
    check_machine(config, torch.cuda.device_count())
