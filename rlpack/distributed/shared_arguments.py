"""Batches among the arguments of a call, as each node's ranks receive them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray

from rlpack.batch.batch import BatchedDataDict
from rlpack.distributed.object_handles import batches_for_node, for_node
from rlpack.distributed.rank_actor import is_batch


class SharedArguments:
    """Batches among the arguments of a call, as ranks receive them; equal ones on one node are one object."""

    def __init__(self, args_of_rank: Sequence[tuple[Any, ...]], nodes: Sequence[str]) -> None:
        """Start to copy the rows that the ranks, which are on `nodes`, need from other nodes."""
        uses: Counter[int] = Counter()
        of_node: dict[str, dict[int, BatchedDataDict]] = {}
        for args, node in zip(args_of_rank, nodes, strict=True):
            batches = [arg for arg in args if is_batch(arg)]
            uses.update(map(id, batches))
            of_node.setdefault(node, {}).update((id(batch), batch) for batch in batches)
        self._local: dict[tuple[int, str], Any] = {}
        for node, batches in of_node.items():
            for key, local in zip(batches, batches_for_node(list(batches.values()), node), strict=True):
                self._local[key, node] = ray.put(local) if uses[key] > 1 else local

    def for_node(self, value: Any, node: str) -> Any:
        """Return an argument as a rank on `node` receives it; a reference if several ranks receive it."""
        return self._local[id(value), node] if is_batch(value) else value


def argument_on_node(value: Any, node: str) -> Any:
    """Return an argument as a rank on `node` receives it; only a shard's own rows travel between nodes."""
    return for_node(value, node) if is_batch(value) else value
