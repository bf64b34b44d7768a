"""The roles of runs with faults: the built-in ones, which carry out orders that the driver's side leaves in files.

An order is a file `orders/<pool>-<rank>-<role>-<method>` that contains a fault. A rank deletes it before it obeys, so
that a call that is repeated finds none.
"""

import functools
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.distributed.dispatch import dispatched_methods
from rlpack.worker import TEXT_COLUMNS, RankContext, Worker, sharded
from rlpack.workers.actor import ActorWorker
from rlpack.workers.reference import ReferenceWorker
from rlpack.workers.reward import RewardWorker
from rlpack.workers.rollout import RolloutWorker

FOLDER = "RLPACK_TEST_FAULTS"
SLOW_S = 1.5
LOST_S = 3600.0


def ask_again_soon() -> None:
    """Shorten the wait after which a process asks for an object again, to less than the deadline of these runs' calls.

    Ray 2.60 may leave a process waiting for an object that exists (`object_handles.get_objects`).
    """
    from rlpack.distributed import object_handles  # not above: it imports Ray, see `tests.forked_workers`

    object_handles._ASK_AGAIN_S = 3.0


def take_order(context: RankContext, role: str, method: str) -> str | None:
    """Return the fault that this rank was ordered for a method of a role, once."""
    order = Path(os.environ[FOLDER]) / "orders" / f"{context.pool}-{context.rank}-{role}-{method}"
    try:
        fault = order.read_text()
        order.unlink()
    except FileNotFoundError:
        return None
    return fault


def suffer(fault: str | None) -> None:
    """Let a fault happen to this process, before it does its work."""
    if fault == "exception":
        raise ValueError("an exception on order")
    if fault == "memory limit":
        exceed_memory_limit()
    if fault == "slow":
        time.sleep(SLOW_S)
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


def exceed_memory_limit() -> None:
    """Allocate more than a limit on this process allows."""
    used, limits = psutil.Process().memory_info().vms, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _faulty(role: str, role_class: type[Any]) -> type[Any]:
    """Return a role's class, with methods that carry out orders."""

    def wrapped(method: Any) -> Any:
        @functools.wraps(method)  # with how the driver calls it
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            fault = take_order(self.context, role, method.__name__)
            suffer(fault)
            result = method(self, *args, **kwargs)
            if fault == "lost reply":
                time.sleep(LOST_S)
            return result

        return run

    def from_settings(cls: Any, context: RankContext, *args: Any, **kwargs: Any) -> Any:
        ask_again_soon()
        fault = take_order(context, role, "start")
        suffer(fault)
        built = role_class.from_settings.__func__(cls, context, *args, **kwargs)
        if fault == "lost reply":
            time.sleep(LOST_S)
        return built

    methods: dict[str, Any] = {name: wrapped(getattr(role_class, name)) for name in dispatched_methods(role_class)}
    name = f"Faulty{role_class.__name__}"
    return type(name, (role_class,), {**methods, "from_settings": classmethod(from_settings), "__module__": __name__})


class Judge(Worker):
    """A user's own role: it prefers short responses."""

    @classmethod
    def from_settings(cls, context: RankContext, config: Any, tokenizer: Any) -> "Judge":
        return cls(context)

    @sharded(reads=(TEXT_COLUMNS,), returns=("rewards", "quarantined"), background=True)
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        rewards = torch.tensor([1.0 / (1 + len(text)) for text in shard["completion"]])
        return shard.keep([]).union({"rewards": rewards, "quarantined": torch.zeros(shard.num_rows, dtype=torch.bool)})


FaultyActorWorker = _faulty("actor", ActorWorker)
FaultyRolloutWorker = _faulty("rollout", RolloutWorker)
FaultyReferenceWorker = _faulty("reference", ReferenceWorker)
FaultyRewardWorker = _faulty("reward", RewardWorker)
FaultyJudge = _faulty("judge", Judge)
CLASSES = {
    "actor": "FaultyActorWorker",
    "rollout": "FaultyRolloutWorker",
    "reference": "FaultyReferenceWorker",
    "reward": "FaultyRewardWorker",
    "judge": "FaultyJudge",
}
