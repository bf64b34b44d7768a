"""Replace engines after a failure, and restore engines whose ranks were restarted.

The latter agree on the buckets of the weights again, and get the weights if that is possible. A new engine has the
weights of the configuration's model. It must never sample with them, so it refuses until weights are published.
Streaming engines get them from the router, like an engine that failed (`rlpack.recipes.driver.router`); others at once,
through a new publication under the version that they had.

With `trainer.lead` and `rollout.publish=drain`, engines may fail while the actor's weights are newer than theirs. So
the published weights are kept in the object store, if there is room for them (`keep_weights`).
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from rlpack.batch.store import Store
from rlpack.config.schema import Config
from rlpack.distributed.calls import Call
from rlpack.distributed.errors import RoleError, in_units
from rlpack.distributed.weights import WeightChannel
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.rollout.engine import STREAMING_ENGINES
from rlpack.workers.actor import ActorWorker
from rlpack.workers.rollout import RolloutWorker

logger = logging.getLogger(__name__)


@contextmanager
def interrupted(rollout: WorkerGroup[RolloutWorker], config: Config) -> Iterator[None]:
    """Interrupt the engines for a block that publishes weights.

    With `rollout.publish=drain`, no engine has rows then, so nothing is called. With `in_flight`, no engine samples
    again before all have passed the canary; if the block raises, none does.

    Raises:
        RoleError: a rank died or missed its deadline.
    """
    if config.rollout.publish != "in_flight":
        yield
        return
    rollout.run(RolloutWorker.interrupt)
    yield
    rollout.run(RolloutWorker.resume)


def replace_failed_engines(rollout: WorkerGroup[RolloutWorker], access: EngineAccess) -> None:
    """Start a new engine for each one that can no longer answer, and count them; weights have to follow.

    Raises:
        RoleError: an engine did not start, or a rank died or missed its deadline.
    """
    access.count_replaced(on_every_rank(rollout, RolloutWorker.replace_failed_engine, starts=True))


def on_every_rank(
    rollout: WorkerGroup[RolloutWorker], method: Callable[[RolloutWorker], bool], *, starts: bool = False
) -> list[bool]:
    """Call a method without arguments on all ranks, and return what each returns.

    Args:
        rollout: the role.
        method: the method.
        starts: whether it starts engines, for which it gets `placement.start_timeout_s` in addition.

    Raises:
        RoleError: a rank raised, died or missed its deadline.
    """
    no_arguments = [()] * rollout.num_ranks
    return rollout.ranks.submit(Call(rollout.role, method.__name__, no_arguments, {}, starts=starts)).result()


def restore_engines(
    rollout: WorkerGroup[RolloutWorker],
    channel: WeightChannel[ActorWorker, RolloutWorker],
    engine: str,
    canary: Tensor,
    main_thread: threading.Thread,
) -> None:
    """Restore restarted engines to the state of the last publication; called before calls are repeated.

    A publication that is under way is repeated by itself.

    Args:
        rollout: the role.
        channel: channel of the actor's weights.
        engine: `rollout.engine`.
        canary: token ids, int64 [R, L].
        main_thread: the thread that trains the actor.

    Raises:
        RoleError: a batch is drawn ahead, so the actor may have other weights by now, and they were not kept.
    """
    channel.agree()
    rollout.run(RolloutWorker.require_weights)
    if engine in STREAMING_ENGINES or channel.is_sending or not channel.is_published:
        return
    if threading.current_thread() is not main_thread and not channel.keeps:
        raise weights_are_gone()
    channel.publish_again(canary)


def keep_weights(channel: WeightChannel[ActorWorker, RolloutWorker], config: Config, store: Store) -> None:
    """Make a channel keep the last published weights, if a batch may be drawn while the actor has newer ones.

    They are stored on the nodes of the ranks that export them, in the part of the object store that batches don't
    claim. If they don't fit, a warning says so.
    """
    if not config.trainer.lead or config.rollout.publish != "drain":
        return
    sizes = channel.bytes_by_node
    fullest = max(sizes, key=lambda node: sizes[node] - store.spare(node))
    size, spare = sizes[fullest], store.spare(fullest)
    channel.keeps = size <= spare
    if not channel.keeps:
        logger.warning(
            "the engines' weights (%s on one node) exceed the part of its object store that batches don't claim (%s), "
            "so they are not kept: if all engines fail while the actor trains (trainer.lead), the run ends; raise "
            "placement.object_store_gb or lower placement.in_flight_gb",
            *(in_units(size), in_units(spare)),
        )


def weights_are_gone() -> RoleError:
    """Return the error of engines that can't get the weights that a batch or an evaluation began with."""
    cause = (
        "engines had to be replaced during a batch or evaluation that runs ahead of training (trainer.lead), and the "
        "actor may have changed since, so the weights that this batch or evaluation began with are gone; resume the "
        "run from its last checkpoint"
    )
    return RoleError("rollout", None, RolloutWorker.replace_failed_engine.__name__, cause)
