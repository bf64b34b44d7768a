"""Claim: bytes of a run's payloads in the object store, stored or reserved (`rlpack.distributed.ray_store`)."""

from dataclasses import dataclass

from rlpack.distributed.store_leases import StoreLease


@dataclass(eq=False)
class Claim:
    """Stored or reserved bytes by node, and the leases on them; without leases (None) they are permanent."""

    sizes: dict[str, int]
    leases: set[StoreLease] | None

    @property
    def size(self) -> int:
        """Return the bytes on all nodes."""
        return sum(self.sizes.values())
