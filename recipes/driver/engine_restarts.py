"""Engines that are replaced after a failure, and what they get whose ranks were started again.

These get the buckets of the weights, and the weights if that is possible.
A new engine has the weights of the configuration's model. It must never sample with them, so it refuses until weights
are published. Streaming engines get them from the router, like an engine that failed (`rlpack.recipes.driver.router`);
others at once, by a new publication under the version that they had.
"""

import threading

from torch import Tensor

from rlpack.distributed.calls import Call
from rlpack.distributed.errors import RoleError
from rlpack.distributed.weights import WeightChannel
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.rollout.engine import STREAMING_ENGINES
from rlpack.workers.actor import ActorWorker
from rlpack.workers.rollout import RolloutWorker


def replace_failed_engines(rollout: WorkerGroup[RolloutWorker], access: EngineAccess) -> None:
    """Start a new engine for each that can't answer any more, and count them; weights have to follow.

    Raises:
        RoleError: an engine did not start, or a rank died or missed its deadline.
    """
    call = Call(rollout.role, RolloutWorker.replace_failed_engine.__name__, [()] * rollout.num_ranks, {})
    access.count_replaced(sum(rollout.ranks.submit(call).result()))


def restore_engines(
    rollout: WorkerGroup[RolloutWorker],
    channel: WeightChannel[ActorWorker, RolloutWorker],
    engine: str,
    canary: Tensor,
    main_thread: threading.Thread,
) -> None:
    """Bring engines that were started again to the state of the last publication; called before calls are repeated.

    A publication that is under way is repeated by itself.

    Args:
        rollout: the role.
        channel: of the actor's weights.
        engine: `rollout.engine`.
        canary: token ids, int64 [R, L].
        main_thread: the thread that trains the actor.

    Raises:
        RoleError: a batch is drawn ahead, so the actor may have other weights by now.
    """
    channel.agree()
    rollout.run(RolloutWorker.require_weights)
    if engine in STREAMING_ENGINES or channel.is_sending or not channel.is_published:
        return
    if threading.current_thread() is not main_thread:
        raise weights_are_gone()
    channel.publish_again(canary)


def weights_are_gone() -> RoleError:
    """Return the error of engines that can't get the weights that a batch or an evaluation began with."""
    cause = (
        "engines had to be replaced during a batch or evaluation that runs ahead of training (trainer.lead), and the "
        "actor may have changed since, so the weights that this batch or evaluation began with are gone; resume the "
        "run from its last checkpoint"
    )
    return RoleError("rollout", None, RolloutWorker.replace_failed_engine.__name__, cause)
