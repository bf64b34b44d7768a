"""A run's payloads in Ray's object store: tokens and texts of its batches, of which the driver has handles.

A rank offloads its result where it was computed (`rlpack.batch.offload`), the driver reserves room for it, and only
then the rank stores it. A step that is too large for the store is one error that says by how much, instead of a step
that spills to disk. Invariants (tests/unit/distributed/test_ray_store.py):

1. bytes in flight never exceed the budget, nor 80 % of a node's store, above which Ray spills to disk;
2. a payload lives until the last lease on it is released, or until it is no longer referenced, whichever is first; one
   that is stored outside of leases, or permanently, lives until it is no longer referenced;
3. `reserve` waits while room may become free (other threads may release leases, other users of the cluster may free
   their objects, and Ray reports freed objects with a delay) and otherwise raises at once; it never waits longer than
   its deadline. A lease is released by the thread that opened it, so a thread that this one waits for
   (`StoreLease.awaited`, `RayStore.waiting`) never waits for the lease.

Copies for ranks of another node, of rows or whole objects, live as long as their call and are not counted.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Self
from weakref import WeakKeyDictionary

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import OffloadedBatch, Payload, offload
from rlpack.distributed.answers import ask_ray
from rlpack.distributed.errors import DRIVER, RoleError, Shortage, StoreFullError, in_units
from rlpack.distributed.object_handles import ObjectHandle, ObjectReader, RowSource, for_node
from rlpack.distributed.ray_internals import stores
from rlpack.distributed.store_claims import Claim
from rlpack.distributed.store_leases import StoreLease, current_lease, current_leases

logger = logging.getLogger(__name__)

# Ray spills to disk once 80 % of a node's store is full; weights in transit to the sampler need room, too.
_SHARE, _SPILLS_AT = 0.6, 0.8
# Ray's processes report freed objects within this time.
_SETTLE_S = 5.0
_POLL_S = 0.1
# Asking Ray for its stores' room takes 2 ms; within this time of the last answer, up to this share of the room that it
# reported is reserved without asking again.
_FRESH_S, _SMALL_SHARE = 1.0, 0.01

# Free and all bytes of each node's store.
Room = Mapping[str, tuple[float, float]]


def _room_of_ray() -> Room:
    return ask_ray(stores)


def _own_node() -> str:
    return ray.get_runtime_context().get_node_id()


class RayStore:
    """The payloads of a run, within a budget of bytes."""

    def __init__(
        self,
        budget: float | None,
        *,
        wait_s: float,
        room: Callable[[], Room] = _room_of_ray,
        has_others: bool = True,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Use the store of the cluster that the driver is connected to.

        Args:
            budget: most bytes in flight at once, over all nodes; None takes 60 % of the store.
            wait_s: longest wait, for another thread to release payloads or for objects to arrive.
            room: returns free and all bytes of each node's store.
            has_others: whether others use the cluster, too; if not, what isn't counted is never theirs.
            is_interrupted: whether to stop waiting for room that others on the cluster hold, as after a Ctrl-C.
        """
        self._ask_ray, self._has_others, self._is_interrupted = room, has_others, is_interrupted
        self._given_budget = budget
        self.measure()
        self._wait_s = wait_s
        # Its lock is reentrant: a handle may be garbage-collected while the lock is held.
        self._changed = threading.Condition()
        self._of_node: Counter[str] = Counter()
        self._claims: set[Claim] = set()
        self._claim_of: WeakKeyDictionary[ObjectHandle, Claim] = WeakKeyDictionary()
        self._leased = self._peak = 0
        self._waits: list[tuple[threading.Thread, StoreLease | None]] = []
        self._dropped: deque[Claim] = deque()  # of freed objects, and still counted

    def measure(self) -> None:
        """Set the size to that of the current nodes, and a budget that wasn't given to its share of it.

        Call it before anything is stored.
        """
        self.size = sum(total for _, total in self._room().values())
        self.budget = _SHARE * self.size if self._given_budget is None else self._given_budget

    def _room(self) -> Room:
        self._reported, self._reported_at, self._unreported = self._ask_ray(), time.monotonic(), Counter[str]()
        return self._reported

    @property
    def in_flight(self) -> int:
        """Return the bytes that are stored or reserved."""
        with self._changed:
            self._count_dropped()
            return sum(self._of_node.values())

    def spare(self, node: str) -> float:
        """Return the bytes of a node's store that are available to payloads other than batches.

        That is everything below the point at which Ray would spill, minus the node's share of the budget.
        """
        return self._spare_of(self._room().get(node, (0.0, 0.0))[1])

    def _spare_of(self, total: float) -> float:
        return max(0.0, _SPILLS_AT - self.budget / self.size) * total

    def room(self, nodes: Iterable[str]) -> float:
        """Return the bytes that leases can hold at once if they are spread evenly over the ranks on these nodes.

        Args:
            nodes: the node of each rank.
        """
        totals, ranks = self._room(), Counter(nodes)
        num_ranks = sum(ranks.values())
        limits = [_SPILLS_AT * totals[node][1] * num_ranks / count for node, count in ranks.items() if node in totals]
        with self._changed:
            return min([self.budget, *limits]) - (self.in_flight - self._leased)

    def pop_peak_bytes(self) -> int:
        """Return the peak number of bytes held by leases since the last call; permanent payloads do not count."""
        with self._changed:
            peak, self._peak = self._peak, self._leased
        return peak

    def lease(self, name: str) -> StoreLease:
        """Open a lease; `name` completes the sentence "released at the end of …"."""
        return StoreLease(self, name)

    @contextmanager
    def waiting(self, under: StoreLease | None = None) -> Iterator[None]:
        """Declare that, inside the block, this thread waits for others and releases none of its leases.

        If only a release of one of its leases could give the others room, they fail at once.

        Args:
            under: the lease that the others store under; None for all other threads.
        """
        wait = threading.current_thread(), under
        with self._changed:
            self._waits.append(wait)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waits.remove(wait)

    def reserve(self, sizes: Mapping[str, int], role: str, method: str) -> "Reservation":
        """Reserve bytes on each node under the current lease, waiting as long as room may become free.

        Raises:
            StoreFullError: there is not enough room.
        """
        started, lease, is_logged = time.monotonic(), current_lease(), False
        with self._changed:
            asks = any(sizes.values()) and not self._has_ample_room(sizes)
            while asks and (shortage := self._shortage(sizes, room := self._room())).size > 0:
                waited = time.monotonic() - started
                # The room exists, but Ray has yet to report it, unless others hold it.
                frees_late = self._fits(sizes, self._of_node, room) and not shortage.others
                patience = min(_SETTLE_S, self._wait_s) if frees_late else self._wait_s
                can_wait = self._fits(sizes, self._unwaitable(), room)
                if not can_wait or waited >= patience or (shortage.others and self._is_interrupted()):
                    raise StoreFullError(role, method, sum(sizes.values()), shortage)
                if shortage.others and waited >= _SETTLE_S and not is_logged:
                    logger.warning(
                        "role %s, in %s: waits up to %g s for room in the object store, of which others, such as "
                        "another run on this cluster, hold %s",
                        *(role, method, self._wait_s, in_units(shortage.others)),
                    )
                    is_logged = True
                self._changed.wait(min(_POLL_S, patience))
            return Reservation(self, self._claim(dict(sizes), None if lease is None else {lease}))

    def _has_ample_room(self, sizes: Mapping[str, int]) -> bool:
        """Return whether there is room for sizes that are small next to what Ray reported a moment ago."""
        unreported = self._unreported + Counter(sizes)
        if time.monotonic() - self._reported_at > _FRESH_S or self._shortage(sizes, self._reported).size > 0:
            return False
        if any(size > _SMALL_SHARE * self._reported[node][0] for node, size in unreported.items()):
            return False
        self._unreported = unreported
        return True

    def _shortage(self, sizes: Mapping[str, int], room: Room) -> Shortage:
        """Return what is missing for these sizes: on a node, or of the budget; 0 bytes or less if there is room."""
        short = self.in_flight + sum(sizes.values()) - self.budget
        found = [Shortage(short, self.in_flight, self.budget)]
        for node, size in sizes.items():
            free, total = room.get(node, (0.0, 0.0))
            limit, in_flight = _SPILLS_AT * total, self._of_node[node]
            usable = min(free - (1 - _SPILLS_AT) * total, limit - in_flight)
            found.append(Shortage(size - usable, in_flight, limit, node, self._of_others(node, free, total)))
        return max(found, key=lambda one: one.size)

    def _of_others(self, node: str, free: float, total: float) -> float:
        """Return the bytes of a node's store that can't be this run's; 0 if all of them may be.

        Not all bytes of this run are counted: weights in transit to the sampler and small objects take at most the part
        of the store that batches leave to them, and copies of rows at most the bytes of the batches on other nodes. On
        many nodes, where these are more than a node's store, others are therefore not recognized. Objects that this run
        has just freed may count as those of others until Ray reports them.
        """
        uncounted = max(self._spare_of(total), (_SPILLS_AT - _SHARE) * total) + self.in_flight - self._of_node[node]
        others = total - free - self._of_node[node]
        return others if self._has_others and others > uncounted else 0.0

    def _fits(self, sizes: Mapping[str, int], used: Mapping[str, int], room: Room) -> bool:
        """Return whether the limits allow these sizes in addition to the bytes that are used on each node."""
        if sum(used.values()) + sum(sizes.values()) > self.budget:
            return False
        limits = {node: _SPILLS_AT * room[node][1] for node in sizes if node in room}
        return all(used.get(node, 0) + sizes[node] <= limit for node, limit in limits.items())

    def _unwaitable(self) -> Counter[str]:
        """Return the bytes of each node that no wait of this thread can free.

        They are under no lease, or under leases that this thread opened (only it releases them) or stores under, or
        that were opened by threads that wait for it.
        """
        own, current, used = threading.current_thread(), set(current_leases()), Counter[str]()
        waiting = {thread for thread, under in self._waits if under is None or under in current}
        for claim in list(self._claims):
            if not claim.leases or any(own in one.threads or one.opener in waiting for one in claim.leases):
                used.update(claim.sizes)
        return used

    def _claim(self, sizes: dict[str, int], leases: set[StoreLease] | None) -> Claim:
        claim = Claim(sizes, leases)
        self._claims.add(claim)
        self._count(claim, +1)
        return claim

    def _drop(self, claim: Claim) -> None:
        """Stop counting a claim, without waiting for a thread that holds the lock and may wait for this one.

        Any thread may collect a handle as garbage, also one that answers a question of the thread with the lock.
        """
        self._dropped.append(claim)
        if self._changed.acquire(timeout=0.0):
            try:
                self._count_dropped()
            finally:
                self._changed.release()

    def _count_dropped(self) -> None:
        """Stop counting the claims of freed objects; the lock is held."""
        while self._dropped:
            claim = self._dropped.popleft()
            if claim in self._claims:
                self._claims.discard(claim)
                self._count(claim, -1)

    def _count(self, claim: Claim, sign: int) -> None:
        with self._changed:
            for node, size in claim.sizes.items():
                self._of_node[node] += sign * size
            size = sign * claim.size  # before `+=`: a collection of garbage in between may count, too
            if claim.leases is not None:
                self._leased += size
            for lease in claim.leases or ():
                lease.count(size)
            self._peak = max(self._peak, self._leased)
            self._changed.notify_all()

    def hold(self, lease: StoreLease, handles: list[ObjectHandle]) -> None:
        """Hold payloads under one more lease."""
        with self._changed:
            for handle in handles:
                assert handle.ref is not None  # raises for one that was released
                claim = self._claim_of.get(handle)
                if claim is not None and claim.leases is not None and lease not in claim.leases:
                    claim.leases.add(lease)
                    lease.handles.add(handle)
                    lease.count(claim.size)

    def release(self, lease: StoreLease, handles: list[ObjectHandle]) -> None:
        """Free the payloads of a lease that no other lease holds."""
        with self._changed:
            for handle in handles:
                claim = self._claim_of[handle]
                assert claim.leases is not None
                claim.leases.discard(lease)
                if not claim.leases:
                    handle.free(f"at the end of {lease.name}")

    def offload_limit(self) -> float:
        """Return the maximum number of bytes that `offload` may store at once: all of them are on the driver's node."""
        return self.room([_own_node()])

    def offload(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Store the driver's own tokens and texts under the current lease.

        Raises:
            StoreFullError: there is no room for them.
        """
        offloaded, payloads = offload(batch)
        node = _own_node()
        with self.reserve({node: sum(offloaded.sizes)}, DRIVER, "offload") as room:
            return _put(offloaded, payloads, node, room)

    def offload_permanently(self, batch: BatchedDataDict) -> BatchedDataDict | None:
        """Store the driver's own tokens and texts under no lease; without waiting, return None if there is no room."""
        offloaded, payloads = offload(batch)
        node = _own_node()
        sizes = {node: sum(offloaded.sizes)}
        with self._changed:
            if self._shortage(sizes, self._room()).size > 0:
                return None
            reservation = Reservation(self, self._claim(sizes, None))
        with reservation as room:
            return _put(offloaded, payloads, node, room)

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with all of its columns in this process; meant for a few rows to show, not for a whole step.

        Raises:
            DataError: their lease was released.
            RoleError: the objects are lost, or don't arrive in time.
        """
        try:
            here = for_node(batch, None).copy()
            here.reader = ObjectReader(self._wait_s)
            return BatchedDataDict(dict(here), row_ids=here.row_ids)
        except RayError as error:
            role, rank = self.producer_of(error) or (DRIVER, None)
            raise RoleError(role, rank, "fetch", f"tokens or texts can't be read: {type(error).__name__}") from error

    def producer_of(self, error: BaseException) -> tuple[str, int | None] | None:
        """Return role and rank that stored an object reported as lost; None if the error is about another object."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        held = [handle for handle in list(self._claim_of) if handle.is_readable]
        lost: list[ObjectHandle] = []
        if isinstance(cause, ObjectLostError):
            lost = [handle for handle in held if handle.ref.hex() == cause.object_ref_hex]
        elif isinstance(cause, RayActorError):  # the rank that was to copy rows
            lost = [one for one in held if one.source and one.source.actor()._actor_id.hex() == cause.actor_id]
        return lost[0].producer if lost else None


class Reservation:
    """Reserved bytes: handles take over their own, the rest is returned."""

    def __init__(self, store: RayStore, claim: Claim) -> None:
        self._store = store
        self._claim = claim

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store._drop(self._claim)

    def keep(
        self,
        ref: ray.ObjectRef,
        size: int,
        node: str,
        source: RowSource | None,
        producer: tuple[str, int | None],
    ) -> ObjectHandle:
        """Return the handle of an object of `size` bytes, which claims them until it is freed."""
        store, leases = self._store, self._claim.leases
        with store._changed:
            store._count(self._claim, -1)
            self._claim.sizes[node] -= size
            store._count(self._claim, +1)
            claim = store._claim({node: size}, None if leases is None else set(leases))
            handle = ObjectHandle(ref, node, source, producer, partial(store._drop, claim))
            store._claim_of[handle] = claim
            for lease in claim.leases or ():
                lease.handles.add(handle)
        return handle


def _put(offloaded: OffloadedBatch, payloads: list[Payload], node: str, room: Reservation) -> BatchedDataDict:
    """Put the payloads of a batch into the store of the driver's node, in room that is reserved for them."""
    sized = zip(payloads, offloaded.sizes, strict=True)
    handles = [room.keep(ray.put(payload), size, node, None, (DRIVER, None)) for payload, size in sized]
    return offloaded.with_handles(handles)
