"""Sleep and wake the generation engines of a run whose roles share GPUs.

    with engines_awake(session, step):      wakes the engines if they sleep
        rollouts = generate(...)
    ...                                     engines sleep: log-probs, updates
    sync_weights(session, step)             wakes their weights, loads, wakes their KV cache

Engines start asleep. They stay awake from a publication of weights to the end of the next step's generation, and so
during evaluation. Without shared GPUs, or with rollout.sleep_level=0, nothing here has an effect.

An engine that failed, or that dies or hangs in one of these calls, is ended before the block returns, so that roles
that train get its memory. It is replaced by the next publication, or before engines are woken.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rlpack.config.roles import sleep_level
from rlpack.recipes.driver.engine_restarts import on_every_rank
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.rollout import RolloutWorker


@contextmanager
def engines_awake(session: Session, step: StepContext) -> Iterator[None]:
    """Wake the engines for a block, and put them to sleep after it.

    The metrics `rollout/gpu_bytes_awake` and `rollout/gpu_bytes_asleep` show how much memory this frees.

    Raises:
        RoleError: a rank raised, died or missed its deadline, or an engine failed the canary.
    """
    wake_engines(session, step)
    yield
    if sleep_level(session.config):
        with step.timer("sleep"):
            awake, asleep = session.rollout.run(RolloutWorker.sleep)
        step.metrics |= {"rollout/gpu_bytes_awake": float(awake), "rollout/gpu_bytes_asleep": float(asleep)}


def wake_engines(session: Session, step: StepContext) -> None:
    """Wake the engines if they sleep; replace those that failed, and publish missing weights again.

    Raises:
        RoleError: see `engines_awake`.
    """
    if sleep_level(session.config):
        with step.timer("wake"):
            if not all(on_every_rank(session.rollout, RolloutWorker.wake)):
                with session.publication():
                    session.replace_engines()
