"""Deadlines of calls to vLLM, derived from the configuration.

Calls that load weights or change the engine's state run within a call of the role, often several in one. Each has a
deadline, and so do all of them together, counted from the beginning of the role's call or from the start of the engine
within it (`rlpack.role_call`). These deadlines are shorter than that of the role's call, so that the rank itself
detects a hang, kills vLLM's process and starts another one. If the role's deadline passed first, the driver would end
the rank.
"""

from typing import NamedTuple

from rlpack.config.schema import Placement, Rollout

# Share of the deadline of the role's call. The rest is for ending vLLM's process, which takes at most 20 s.
_OF_CALL = 0.5
# Share of the deadline of the role's start. The rest is for work before vLLM starts, such as making a new model.
_OF_START = 0.9


class Deadline(NamedTuple):
    """A time limit, and the key that sets it.

    Attributes:
        seconds: the time.
        source: the key.
        together: time limit of all vLLM calls within one call of the role together; None for none.

    >>> str(Deadline(30.0, "half of placement.call_timeout_s=60"))
    '30 s (half of placement.call_timeout_s=60)'
    """

    seconds: float
    source: str
    together: "Deadline | None" = None

    def __str__(self) -> str:
        """Return the deadline as errors show it."""
        return f"{self.seconds:g} s ({self.source})"


class Deadlines(NamedTuple):
    """The deadlines of an engine.

    Attributes:
        start: deadline of the engine's start.
        control: deadline of a call that loads weights, or reads or changes the engine's state.
        request_s: time limit of a response in seconds, `rollout.request_timeout_s`.
    """

    start: Deadline
    control: Deadline
    request_s: float

    @classmethod
    def of(cls, rollout: Rollout, placement: Placement) -> "Deadlines":
        """Return the deadlines of a configuration.

        >>> deadlines = Deadlines.of(Rollout(), Placement(call_timeout_s=100.0))
        >>> str(deadlines.control)
        '50 s (half of placement.call_timeout_s=100)'
        >>> str(Deadlines.of(Rollout(), Placement()).control)
        '600 s (rollout.request_timeout_s=600)'
        """
        start_s, call_s, request_s = placement.start_timeout_s, placement.call_timeout_s, rollout.request_timeout_s
        start = Deadline(_OF_START * start_s, f"{_OF_START:g} of placement.start_timeout_s={start_s:g}")
        half = Deadline(_OF_CALL * call_s, f"half of placement.call_timeout_s={call_s:g}")
        if request_s <= half.seconds:
            control = Deadline(request_s, f"rollout.request_timeout_s={request_s:g}", half)
        else:
            control = half._replace(together=half)
        return cls(start, control, request_s)
