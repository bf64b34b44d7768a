"""Wait for nodes that are missing when a run is restarted, as after a reboot; any other run is refused at once."""

import logging
import time
from collections.abc import Callable

from rlpack.distributed.errors import PlacementError
from rlpack.user_code import Interrupted

logger = logging.getLogger(__name__)

# Interval at which the nodes are asked for.
_LOOK_S = 1.0


class _Process:
    """What is known about the run of this process."""

    is_restarted = False


def expect_missing_nodes() -> None:
    """Let this process wait for nodes: an earlier attempt of its run found all it needs."""
    _Process.is_restarted = True


def wait_for_capacity(check: Callable[[], None], timeout_s: float, is_interrupted: Callable[[], bool]) -> None:
    """Call `check` until it passes or the deadline has passed; only once, unless the run was restarted.

    Args:
        check: raises a `PlacementError` while the cluster has too few devices.
        timeout_s: deadline, in seconds.
        is_interrupted: whether to stop waiting, as after a Ctrl-C.

    Raises:
        Interrupted: `is_interrupted` returned True.
        PlacementError: of the last check.
    """
    deadline, is_warned = time.monotonic() + timeout_s, False
    while True:
        try:
            return check()
        except PlacementError as error:
            if not _Process.is_restarted or time.monotonic() >= deadline:
                raise
            if not is_warned:
                is_warned = True
                logger.warning(
                    "%s. The run was restarted, so a node may be missing temporarily: waiting up to "
                    "placement.start_timeout_s=%g s for it",
                    *(error, timeout_s),
                )
        if is_interrupted():
            raise Interrupted
        time.sleep(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
