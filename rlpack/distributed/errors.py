"""What can go wrong between the driver and its ranks."""


class PlacementError(ValueError):
    """Roles, pools or devices that the cluster cannot give; the text says what is free."""


class RoleError(RuntimeError):
    """A call of a role failed: a rank raised, died, or did not answer by its deadline.

    Attributes:
        role: name of the role.
        rank: rank that failed first, or None when it cannot be told.
        method: the method that was called (the phase of the step).
        cause: what happened, in words.
        phase: `warm_up` or `train`, where the caller knows it.
        step: the step under way, where the caller knows it.
    """

    def __init__(self, role: str, rank: int | None, method: str, cause: str) -> None:
        super().__init__(role, rank, method, cause)
        self.role, self.rank, self.method, self.cause = role, rank, method, cause
        self.phase: str | None = None
        self.step: int | None = None

    def __str__(self) -> str:
        """Return one line: role, rank, method, step and cause."""
        where = f"rank {self.rank}" if self.rank is not None else "some rank"
        when = "" if self.step is None else f", step {self.step} of {self.phase}"
        return f"role {self.role}, {where}, in {self.method}{when}: {self.cause}"


class StoreFullError(RoleError):
    """A result has no room in the object store.

    Attributes:
        size: bytes of the result.
        short: bytes that are missing.
    """

    def __init__(self, role: str, method: str, size: int, short: float, in_flight: int, budget: float) -> None:
        cause = (
            f"{size / 1e6:,.1f} MB of tokens and texts have no room in the object store: {in_flight / 1e6:,.1f} of "
            f"{budget / 1e6:,.1f} MB for batches are taken, {short / 1e6:,.1f} MB are missing; lower "
            "trainer.prompts_per_step, trainer.group_size or rollout.max_new_tokens (in an evaluation: "
            "evaluation.samples), or raise placement.object_store_gb (on a cluster that is joined: ray start "
            "--object-store-memory) or placement.in_flight_gb"
        )
        super().__init__(role, None, method, cause)
        self.args = (role, method, size, short, in_flight, budget)
        self.size, self.short = size, short
