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
