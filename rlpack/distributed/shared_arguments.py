"""Batches among the arguments of a call, as each node's ranks receive them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray

from rlpack.distributed.object_handles import for_node
from rlpack.distributed.rank_actor import is_batch


class SharedArguments:
    """Batches among the arguments of a call, as ranks receive them; equal ones on one node are one object."""

    def __init__(self, args_of_rank: Sequence[tuple[Any, ...]]) -> None:
        self._uses = Counter(id(arg) for args in args_of_rank for arg in args if is_batch(arg))
        self._local: dict[tuple[int, str], Any] = {}

    def for_node(self, value: Any, node: str) -> Any:
        """Return an argument as a rank on `node` receives it; a reference if several ranks receive it."""
        if not is_batch(value):
            return value
        key = (id(value), node)
        if key not in self._local:
            local = argument_on_node(value, node)
            self._local[key] = ray.put(local) if self._uses[id(value)] > 1 else local
        return self._local[key]


def argument_on_node(value: Any, node: str) -> Any:
    """Return an argument as a rank on `node` receives it; only a shard's own rows travel between nodes."""
    return for_node(value, node) if is_batch(value) else value
