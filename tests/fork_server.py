"""One fork server for the whole test session: processes that have their imports when they begin."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest.mock import patch

# All that any test needs, as the server imports once. What `rlpack train` imports, and what its ranks do.
_IMPORTS = [
    "rlpack.cli.train",
    "rlpack.recipes.grpo",
    "rlpack.recipes.sft",
    "rlpack.observe.report.report",
    "rlpack.workers.actor",
    "matplotlib.backends.backend_svg",
    "numba",
    "tests.distributed.models.ranks",
    "tests.distributed.layouts.ranks",
]


def environment() -> dict[str, str]:
    """Return the environment of a new process, without what a Ray of this process has set.

    Ray reads some of its variables once, as it is imported: the server's must be those of the processes it forks.
    A process that crashes prints its Python stacks.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}


def fork_context() -> ForkServerContext:
    """Return the context whose processes come from the fork server, which is started by the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    with patch.dict(os.environ, environment(), clear=True):
        forkserver.ensure_running()
    return context
