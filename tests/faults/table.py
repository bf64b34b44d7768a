"""The table of faults: roles × phases × kinds, what is expected of each, and why a cell can't occur."""

from dataclasses import dataclass
from typing import Any, Literal

PHASES = (
    *("start", "generate", "score", "advantages", "plan", "log-probs", "update", "transfer", "checkpoint"),
    "evaluation",
)
FAULTS = ("kill", "stop", "exception", "memory limit", "lost reply", "slow")
RANKED = ("trainer rank 0", "trainer rank k", "rollout", "reference", "reward pool", "judge")
ROLES = ("driver", *RANKED, "weight transfer", "raylet", "GCS")
# Roles in a pool of their own, or in that of the actor.
LAYOUTS = ("own pools", "one pool")

Outcome = Literal["repeated", "error", "resumed", "unchanged"]

# The phases in which a rank runs a method, which only then can raise, lose its reply, or exceed its memory.
ACTIVE = {
    "trainer rank 0": ("start", "log-probs", "update", "transfer", "checkpoint"),
    "trainer rank k": ("start", "log-probs", "update", "transfer", "checkpoint"),
    "rollout": ("start", "generate", "transfer", "evaluation"),
    "reference": ("start", "log-probs"),
    "reward pool": ("start", "score", "evaluation"),
    "judge": ("start", "score"),  # evaluations ask the reward role alone
    "weight transfer": ("transfer",),
}
NAMES = {
    "trainer rank 0": ("actor", 0),
    "trainer rank k": ("actor", 1),
    "rollout": ("rollout", 0),
    "reference": ("reference", 0),
    "reward pool": ("reward", 0),
    "judge": ("judge", 0),
    "driver": ("driver", 0),
    "raylet": ("raylet", 0),
    "GCS": ("gcs", 0),
    "weight transfer": ("rollout", 0),
}


@dataclass(frozen=True)
class Case:
    """One cell of the table.

    Attributes:
        role: of the table's roles.
        phase: when it happens.
        fault: what happens.
        layout: where the stateless roles run.
        outcome: what is expected.
    """

    role: str
    phase: str
    fault: str
    layout: str
    outcome: Outcome

    @property
    def is_order(self) -> bool:
        """Whether a rank does it to itself within a call; else, a process is sent a signal."""
        return self.phase in ACTIVE.get(self.role, ())

    @property
    def ends_workers(self) -> bool:
        """Whether Ray's workers have to end by themselves, since the driver, the raylet or the GCS died or stopped."""
        return self.role in ("driver", "raylet", "GCS") and self.fault in ("kill", "stop")

    def planned(self, step: int) -> dict[str, Any]:
        """Return the case as an entry of a run's plan."""
        role, rank = NAMES[self.role]
        by = "order" if self.is_order else "signal"
        names = {"role": role, "rank": rank, "phase": self.phase, "fault": self.fault, "by": by}
        return names | {"step": 0 if self.phase == "start" else step, "id": str(self)}

    def __str__(self) -> str:
        return f"{self.role}, {self.phase}, {self.fault}, {self.layout}"


def reason_against(role: str, phase: str, fault: str) -> str | None:
    """Return why a cell can't occur, None if it can."""
    if role in ("raylet", "GCS") and fault in ("exception", "memory limit", "lost reply"):
        return "the daemon isn't rlpack's code; what it does by itself ends in a death or a silence, which are cells"
    if role == "driver" and fault == "lost reply":
        return "nothing waits for a reply of the driver"
    if role == "weight transfer":
        if phase != "transfer":
            return "weights move in this phase only"
        return "the cells of rollout and trainers in this phase; the 18 faults of a transport are in weight_faults.py"
    if role in RANKED and fault in ("exception", "memory limit", "lost reply") and phase not in ACTIVE[role]:
        return "the rank runs no method in this phase"
    return None


def expected(role: str, phase: str, fault: str, layout: str) -> Outcome:
    """Return what a fault has to lead to."""
    if fault == "slow":
        return "unchanged"
    if role == "driver":
        return "resumed" if fault in ("kill", "stop") else "error"
    if role in ("raylet", "GCS", "trainer rank 0", "trainer rank k") or layout == "one pool":
        return "error"
    return "error" if fault in ("exception", "memory limit") else "repeated"


def cases() -> list[Case]:
    """Return all cells that can occur: those of stateless roles in both layouts, the others with one pool."""
    found: list[Case] = []
    for role in ROLES:
        layouts = ("one pool",) if role in ("driver", "trainer rank 0", "trainer rank k", "raylet", "GCS") else LAYOUTS
        for layout in layouts:
            for phase in PHASES:
                found += [
                    Case(role, phase, fault, layout, expected(role, phase, fault, layout))
                    for fault in FAULTS
                    if reason_against(role, phase, fault) is None
                ]
    return found
