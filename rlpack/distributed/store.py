"""What a run holds in Ray's object store: the tokens and texts of its batches, of which the driver has references.

A rank's result is outlined where it was made (`rlpack.data.holding`), the driver reserves room for it, and only then
the rank puts it away. So the store can be too small for a step, which is one error that says by how much, but it never
overflows to disk in the middle of one. Invariants (tests/unit/distributed/test_store.py):

1. bytes in flight never pass the budget, and what a step put away is free when it ends, whoever still has its batches;
2. `reserve` waits while room may still come, from another step or from Ray, which frees a moment late, and raises at
   once where it can't; it never waits longer than its deadline;
3. reading a batch whose step is over is an error that says so.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import ray

from rlpack.data.batch import BatchedDataDict
from rlpack.data.errors import DataError
from rlpack.data.holding import outline
from rlpack.data.remote import Part, Remote
from rlpack.distributed.errors import StoreFullError

# Ray writes objects to disk from 80 % of its store on; weights on their way to the sampler need room, too.
_SHARE, _SPILLS_AT = 0.6, 0.8
# By then Ray's processes have heard of what was freed, and have said so.
_SETTLE_S = 5.0
_POLL_S = 0.1


class StoredPart:
    """Columns in the object store; its holder can cut rows out for another node."""

    def __init__(self, ref: ray.ObjectRef, node: str | None = None, holder: Any = None) -> None:
        self._ref: ray.ObjectRef | None = ref
        self.node = node
        self.holder = holder

    @property
    def ref(self) -> ray.ObjectRef:
        """Return the reference.

        Raises:
            DataError: the step that the part is of is over.
        """
        if self._ref is None:
            raise DataError(
                "tokens and texts of this batch were freed when its step ended; read them in the step that made them"
            )
        return self._ref

    def free(self) -> None:
        """Let the object go."""
        self._ref = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredPart, (self.ref,)


class Reader:
    """Gets parts from the store, where they are read in place; each once for as long as the reader lives."""

    def __init__(self) -> None:
        self._found: dict[Part, Mapping[str, Any]] = {}

    def __call__(self, parts: Sequence[Part]) -> list[Mapping[str, Any]]:
        """Return the columns of each part."""
        missing = [part for part in parts if isinstance(part, StoredPart) and part not in self._found]
        if missing:
            self._found |= zip(missing, ray.get([part.ref for part in missing]), strict=True)
        return [self._found[part] for part in parts]


def near(batch: BatchedDataDict, node: str) -> BatchedDataDict:
    """Return the batch as a rank on `node` is given it: parts on other nodes are cut down to its rows by their holders.

    So a rank's shard costs the network its own bytes; on a node of one's own, whole parts are read in place.
    """
    columns = {name: column for name, column in batch.items() if isinstance(column, Remote)}
    wanted: dict[StoredPart, dict[str, np.ndarray]] = {}
    for column in columns.values():
        for part, rows in zip(column.parts, column.rows_of_parts(), strict=True):
            if isinstance(part, StoredPart) and part.holder is not None and part.node != node:
                of_part = wanted.setdefault(part, {})
                of_part[column.name] = np.union1d(of_part.get(column.name, rows), rows)
    if not wanted:
        return batch
    cuts: dict[Part, StoredPart] = {
        part: StoredPart(part.holder.cut.remote(part.ref, rows)) for part, rows in wanted.items()
    }
    found = batch.copy()
    for name, column in columns.items():
        kept: dict[Part, np.ndarray] = {part: rows[column.name] for part, rows in wanted.items() if column.name in rows}
        found[name] = column.renumbered(kept).relocated({part: cuts.get(part, part) for part in column.parts})
    return found


class _Step:
    """What one step has in flight."""

    def __init__(self) -> None:
        self.parts: list[StoredPart] = []
        self.bytes = 0


def _room_of_ray() -> tuple[float, float]:
    """Return free and all bytes of the cluster's object store."""
    free, total = (kind().get("object_store_memory", 0.0) for kind in (ray.available_resources, ray.cluster_resources))
    return free, total


class RayStore:
    """The batches of a run, within a budget of bytes."""

    def __init__(
        self, budget: float | None, *, wait_s: float, room: Callable[[], tuple[float, float]] = _room_of_ray
    ) -> None:
        """Take the store of the cluster that the driver is connected to.

        Args:
            budget: most bytes in flight at once, over all nodes; None takes 60 % of the store.
            wait_s: longest wait for another step to free what it holds.
            room: returns free and all bytes of the store.
        """
        self.budget = _SHARE * room()[1] if budget is None else budget
        self._wait_s = wait_s
        self._room = room
        self._changed = threading.Condition()
        self._always = _Step()
        self._steps = {self._always}
        self._current: ContextVar[_Step] = ContextVar("step", default=self._always)
        self._peak = 0

    @property
    def in_flight(self) -> int:
        """Return the bytes that are held."""
        return sum(step.bytes for step in self._steps)

    def take_peak(self) -> int:
        """Return the most bytes that were held at once since it was last asked."""
        with self._changed:
            peak, self._peak = self._peak, self.in_flight
        return peak

    @contextmanager
    def step(self) -> Iterator[None]:
        """Free all that is put away inside, at its end; what is put away outside of any step stays."""
        step = _Step()
        with self._changed:
            self._steps.add(step)
        before = self._current.get()
        self._current.set(step)
        try:
            yield
        finally:
            self._current.set(before)
            with self._changed:
                for part in step.parts:
                    part.free()
                self._steps.remove(step)
                self._changed.notify_all()

    def reserve(self, size: int, role: str, method: str) -> None:
        """Count `size` bytes in, for the step under way; wait for room where some may come.

        Raises:
            StoreFullError: there is none.
        """
        started = time.monotonic()
        own = self._current.get()
        with self._changed:
            while (short := self._shortage(size)) > 0:
                others_hold = any(step.bytes for step in self._steps - {own, self._always})
                patience = self._wait_s if others_hold else min(_SETTLE_S, self._wait_s)
                if size > self.budget or time.monotonic() - started >= patience:
                    raise StoreFullError(role, method, size, short, self.in_flight, self.budget)
                self._changed.wait(min(_POLL_S, patience))
            own.bytes += size
            self._peak = max(self._peak, self.in_flight)

    def _shortage(self, size: int) -> float:
        """Return the bytes that are missing for `size` more, 0 or less if none are."""
        free, total = self._room()
        return max(self.in_flight + size - self.budget, size - (free - (1 - _SPILLS_AT) * total))

    def keep(self, part: StoredPart) -> StoredPart:
        """Hold a part, whose bytes were reserved, until the step under way ends."""
        self._current.get().parts.append(part)
        return part

    def put(self, batch: BatchedDataDict, *, for_good: bool = False) -> BatchedDataDict:
        """Put the driver's own tokens and texts away, for the step under way or for good.

        Raises:
            StoreFullError: there is no room for them.
        """
        if for_good:
            before = self._current.get()
            self._current.set(self._always)
            try:
                return self.put(batch)
            finally:
                self._current.set(before)
        found, parts = outline(batch)
        self.reserve(sum(found.sizes), "driver", "put")
        return found.at([self.keep(StoredPart(ray.put(part))) for part in parts])

    def take(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with all of its columns here: for a few rows to be shown, not for a step's."""
        here = batch.copy()
        here.fetch = Reader()
        return BatchedDataDict(dict(here), row_ids=here.row_ids)
