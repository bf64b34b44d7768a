"""Errors between the driver and its ranks, and of job servers."""

from typing import NamedTuple

# The role name in a `RoleError` of the driver itself.
DRIVER = "driver"
# Digits of a node's id in messages, enough to find it in Ray's lists.
_ID_DIGITS = 12
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class PlacementError(ValueError):
    """A role, pool or device that can't be placed; the message says what is free."""


class UnavailableError(PlacementError):
    """Ray didn't start, or devices stayed in use; another attempt may succeed."""


class RankError(RuntimeError):
    """Stands in for an exception of a role that can't be pickled.

    Attributes:
        kind: name of its type.
        message: its text.
        traceback: its traceback, as Python prints it.
    """

    def __init__(self, kind: str, message: str, traceback: str) -> None:
        super().__init__(kind, message, traceback)
        self.kind, self.message, self.traceback = kind, message, traceback

    def __str__(self) -> str:
        """Return type and message of the exception."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class RoleError(RuntimeError):
    """A call of a role failed: a rank raised, died, or did not answer by its deadline.

    Attributes:
        role: name of the role.
        rank: rank that failed first, or None if unknown.
        method: the method that was called.
        cause: what happened.
        phase: `sft_warmup` or `train`, if the caller knows it.
        step: the step in progress, if the caller knows it.
        hint: what to do, if that isn't part of the cause.
        original: the exception that the rank raised, such as an `EngineError`; None if it raised none.
    """

    def __init__(self, role: str, rank: int | None, method: str, cause: str) -> None:
        super().__init__(role, rank, method, cause)
        self.role, self.rank, self.method, self.cause = role, rank, method, cause
        self.original: Exception | None = None
        self.phase: str | None = None
        self.step: int | None = None
        self.hint: str | None = None

    def __str__(self) -> str:
        """Return one line: role, rank, method, step, cause and hint."""
        when = "" if self.step is None else f", step {self.step} of {self.phase}"
        hint = "" if self.hint is None else f"; {self.hint}"
        return f"{self._where()}, in {self.method}{when}: {self.cause}{hint}"

    def _where(self) -> str:
        if self.role == DRIVER:
            return "the driver"
        return f"role {self.role}, {'some rank' if self.rank is None else f'rank {self.rank}'}"


class RowFailure(NamedTuple):
    """Why a row has no result.

    Attributes:
        row: its id in the batch.
        uid: id of its prompt.
        num_attempts: number of attempts, all of which failed.
        reason: why the last one failed.
        policy_version: version of the weights in the last attempt; None if the process was started again meanwhile.
    """

    row: int
    uid: str
    num_attempts: int
    reason: str
    policy_version: int | None


class RowError(RoleError):
    """A row failed too often.

    Attributes:
        failure: the row, and why it failed.
    """

    def __init__(self, role: str, rank: int, method: str, failure: RowFailure) -> None:
        row = f"row {failure.row} of prompt {failure.uid}"
        text = f"{row} failed {failure.num_attempts} times, the last time with: {failure.reason}"
        super().__init__(role, rank, method, text)
        self.args = (role, rank, method, failure)
        self.failure = failure


class RanksRestartedError(RoleError):
    """The ranks of a call were restarted; the call can't be repeated, since rows of earlier calls are lost."""

    def __init__(self, error: RoleError) -> None:
        """Wrap the error that caused the restart."""
        super().__init__(error.role, error.rank, error.method, error.cause)
        self.args = (error,)


class Shortage(NamedTuple):
    """Room that is missing in the object store.

    Attributes:
        size: bytes by which a result exceeds the free room.
        in_flight: bytes of batches there.
        limit: most bytes of batches there.
        node: Ray's id of the node whose store is too small; None if all nodes together have too little room.
        others: bytes there that other users of the cluster hold; 0 if all of them may be this run's.
    """

    size: float
    in_flight: int
    limit: float
    node: str | None = None
    others: float = 0.0


class StoreFullError(RoleError):
    """The object store has no room for a result.

    Attributes:
        size: bytes of the result.
        short: bytes by which it exceeds the free room.
    """

    def __init__(self, role: str, method: str, size: int, shortage: Shortage) -> None:
        node = "" if shortage.node is None else f" of node {shortage.node[:_ID_DIGITS]}"
        others = (
            f", and others, such as another run on this cluster, hold {in_units(shortage.others)}; wait until they end,"
            if shortage.others
            else ";"
        )
        cause = (
            f"{in_units(size)} of tokens and texts exceed the free room in the object store{node} by "
            f"{in_units(shortage.size)}: {in_units(shortage.in_flight)} of the {in_units(shortage.limit)} for batches "
            f"are in use{' there' if node else ''}{others} lower trainer.prompts_per_step, trainer.group_size, "
            "rollout.max_new_tokens, dapo.max_rounds (in an evaluation: evaluation.samples) or trainer.lead (batches "
            "drawn ahead take room, too), or raise placement.object_store_gb (on an existing cluster: ray start "
            f"--object-store-memory){'' if node else ' or placement.in_flight_gb'}"
        )
        super().__init__(role, None, method, cause)
        self.args = (role, method, size, shortage)
        self.size, self.short = size, shortage.size

    def _where(self) -> str:
        return "the driver" if self.role == DRIVER else f"role {self.role}"  # the result of all its ranks


def in_units(size: float) -> str:
    """Format a number of bytes.

    >>> in_units(1234), in_units(56_000_000), in_units(7)
    ('1.23 kB', '56 MB', '7 bytes')
    """
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"


class ClusterError(RuntimeError):
    """A daemon of the Ray that a run has started for itself ended during the run.

    Attributes:
        cause: which daemon, and how it ended.
        logs: the folder of Ray's logs.
    """

    def __init__(self, cause: str, logs: str) -> None:
        super().__init__(cause, logs)
        self.cause, self.logs = cause, logs

    def __str__(self) -> str:
        """Return the cause, where the logs are, and the fix."""
        return (
            f"{self.cause} during the run, which can't continue without it; see {self.logs} and the kernel's log "
            "for the reason (out of memory, another program); run the same command with its run_dir and resume=auto to "
            "continue"
        )


class JobRequestError(ValueError):
    """An invalid request to a job server: a wrong address or token, or an unknown job."""


class JobServerError(RuntimeError):
    """A job server failed, or did not answer by the deadline."""
