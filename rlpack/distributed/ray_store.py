"""What a run holds in Ray's object store: the tokens and texts of its batches, of which the driver has references.

A rank's result is outlined where it was made (`rlpack.batch.offload`), the driver reserves room for it, and only then
the rank puts it away. So a step that is too large for the store is one error that says by how much, and not a step that
goes by way of the disk. Invariants (tests/unit/distributed/test_store.py):

1. bytes in flight never pass the budget, nor 80 % of a node's store, from where on Ray writes to disk;
2. what a step put away is free when it ends, whoever still has its batches, and before that when nobody has;
3. `reserve` waits while room may still come, from a step of another thread or from Ray, which frees a moment late, and
   raises at once where it can't; it never waits longer than its deadline.

Copies that are cut for ranks of another node live as long as their call and are not counted.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import ray
import ray._private.state
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import offload
from rlpack.distributed.errors import DRIVER, RoleError, StoreFullError
from rlpack.distributed.object_handles import Reader, StoredPart, localised

# Ray writes objects to disk from 80 % of a node's store on; weights on their way to the sampler need room, too.
_SHARE, _SPILLS_AT = 0.6, 0.8
# By then Ray's processes have heard of what was freed, and have said so.
_SETTLE_S = 5.0
_POLL_S = 0.1

# Free and all bytes of each node's store.
Room = Mapping[str, tuple[float, float]]


class _Step:
    """What one step has in flight."""

    def __init__(self, outer: "_Step | None") -> None:
        self.outer = outer
        self.parts: WeakSet[StoredPart] = WeakSet()
        self.bytes = 0

    def chain(self) -> Iterator["_Step"]:
        """Yield this step and those that it lies in."""
        step: _Step | None = self
        while step is not None:
            yield step
            step = step.outer


_CURRENT: ContextVar[_Step | None] = ContextVar("rlpack_step", default=None)


def _room_of_ray() -> Room:
    key = "object_store_memory"
    free = ray._private.state.available_resources_per_node()
    total = ray._private.state.total_resources_per_node()
    return {node: (free.get(node, {}).get(key, 0.0), of_node.get(key, 0.0)) for node, of_node in total.items()}


class RayStore:
    """The batches of a run, within a budget of bytes."""

    def __init__(self, budget: float | None, *, wait_s: float, room: Callable[[], Room] = _room_of_ray) -> None:
        """Take the store of the cluster that the driver is connected to.

        Args:
            budget: most bytes in flight at once, over all nodes; None takes 60 % of the store.
            wait_s: longest wait, for another step to free what it holds or for parts to come.
            room: returns free and all bytes of each node's store.
        """
        self.size = sum(total for _, total in room().values())
        self.budget = _SHARE * self.size if budget is None else budget
        self._wait_s = wait_s
        self._room = room
        self._changed = threading.Condition()  # its lock is one that a thread may take again: parts die anywhere
        self._of_node: Counter[str] = Counter()
        self._parts: WeakSet[StoredPart] = WeakSet()
        self._of_steps = self._peak = 0

    @property
    def in_flight(self) -> int:
        """Return the bytes that are held or reserved."""
        return sum(self._of_node.values())

    def pop_peak_bytes(self) -> int:
        """Return the most bytes that steps held at once since it was last asked; what stays for good is not counted."""
        with self._changed:
            peak, self._peak = self._peak, self._of_steps
        return peak

    @contextmanager
    def step(self) -> Iterator[None]:
        """Free all that is put away inside, at its end."""
        step = _Step(_CURRENT.get())
        _CURRENT.set(step)
        try:
            yield
        finally:
            _CURRENT.set(step.outer)
            for part in list(step.parts):
                part.free()

    def reserve(self, sizes: Mapping[str, int], role: str, method: str) -> "Reservation":
        """Count bytes of each node in, for the step under way; wait for room where some may come.

        Raises:
            StoreFullError: there is none.
        """
        started, size, step = time.monotonic(), sum(sizes.values()), _CURRENT.get()
        with self._changed:
            while size and (short := self._shortage(sizes)) > 0:
                # What no wait can free: this step's own, and what lies outside of steps, datasets for one.
                outside = self.in_flight - self._of_steps
                own = outside + sum(outer.bytes for outer in step.chain()) if step else self.in_flight
                frees_late = self.in_flight + size <= self.budget  # the bytes are there, Ray has yet to say so
                patience = min(_SETTLE_S, self._wait_s) if frees_late else self._wait_s
                if own + size > self.budget or time.monotonic() - started >= patience:
                    raise StoreFullError(role, method, size, short, self.in_flight, self.budget)
                self._changed.wait(min(_POLL_S, patience))
            self._count(sizes, step, +1)
        return Reservation(self, dict(sizes), step)

    def _shortage(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes that are missing for these, 0 or less if none are."""
        room = self._room()
        short = self.in_flight + sum(sizes.values()) - self.budget
        for node, size in sizes.items():
            free, total = room.get(node, (0.0, 0.0))
            usable = min(free - (1 - _SPILLS_AT) * total, _SPILLS_AT * total - self._of_node[node])
            short = max(short, size - usable)
        return short

    def _count(self, sizes: Mapping[str, int], step: _Step | None, sign: int) -> None:
        with self._changed:
            for node, size in sizes.items():
                self._of_node[node] += sign * size
            if step is not None:
                step.bytes += sign * sum(sizes.values())
                self._of_steps += sign * sum(sizes.values())
            self._peak = max(self._peak, self._of_steps)
            self._changed.notify_all()

    def offload(self, batch: BatchedDataDict, *, permanent: bool = False) -> BatchedDataDict:
        """Put the driver's own tokens and texts away, until the step ends, or `permanent`: as long as someone has them.

        Raises:
            StoreFullError: there is no room for them.
        """
        if permanent:
            before = _CURRENT.get()
            _CURRENT.set(None)
            try:
                return self.offload(batch)
            finally:
                _CURRENT.set(before)
        found, parts = offload(batch)
        node = ray.get_runtime_context().get_node_id()
        with self.reserve({node: sum(found.sizes)}, DRIVER, "offload") as room:
            sized = zip(parts, found.sizes, strict=True)
            return found.with_handles(
                [room.keep(ray.put(part), size, node, None, (DRIVER, None)) for part, size in sized]
            )

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with all of its columns here: for a few rows to be shown, not for a step's.

        Raises:
            RoleError: what they lie in is gone, or doesn't come in time.
        """
        here = localised(batch, None).copy()
        here.reader = Reader(self._wait_s)
        try:
            return BatchedDataDict(dict(here), row_ids=here.row_ids)
        except RayError as error:
            role, rank = self.maker_of(error) or (DRIVER, None)
            raise RoleError(role, rank, "fetch", f"tokens or texts can't be read: {type(error).__name__}") from error

    def maker_of(self, error: BaseException) -> tuple[str, int | None] | None:
        """Return role and rank that put away what an error says is lost; None where it speaks of nothing of ours."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        held = [part for part in list(self._parts) if part.is_held]
        if isinstance(cause, ObjectLostError):
            found = [part for part in held if part.ref.hex() == cause.object_ref_hex]
        elif isinstance(cause, RayActorError):  # whoever was to cut rows out
            found = [part for part in held if part.holder is not None and part.holder._actor_id.hex() == cause.actor_id]
        else:
            found = []
        return found[0].maker if found else None


class Reservation:
    """Bytes that are counted in: each part that is kept takes its own over, and what is left is given back."""

    def __init__(self, store: RayStore, sizes: dict[str, int], step: _Step | None) -> None:
        self._store = store
        self._sizes = sizes
        self._step = step

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self._store._count(self._sizes, self._step, -1)

    def keep(self, ref: ray.ObjectRef, size: int, node: str, holder: Any, maker: tuple[str, int | None]) -> StoredPart:
        """Return the handle of a part of `size` bytes, which holds them until it is freed."""
        store, step = self._store, self._step
        part = StoredPart(ref, node, holder, maker, lambda: store._count({node: size}, step, -1))
        self._sizes[node] -= size
        store._parts.add(part)
        if step is not None:
            step.parts.add(part)
        return part
