"""Waiting for ranks and for Ray, no longer than to a deadline or the end of Ray itself."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlpack.background_call import BackgroundCall
from rlpack.distributed.errors import ClusterError
from rlpack.distributed.ray_watch import current, raise_if_ray_ended

# Interval at which a wait checks that Ray's daemons run.
_LOOK_S = 0.25
# A GCS that runs answers within milliseconds; it may be busy, or start a process first.
_ASK_S = 30.0
# A value that exists at the deadline may take this long to arrive from its node.
_FETCH_S = 1.0

R = TypeVar("R")


class Answer(NamedTuple):
    """What a rank answered: a value, or an error."""

    ref: ray.ObjectRef
    value: Any
    error: RayError | None


def arrived(refs: list[ray.ObjectRef], deadline: float) -> list[Answer]:
    """Return all answers that have arrived, once there are any; [] at the `time.monotonic()` time `deadline`.

    A value that its node doesn't deliver is left out.

    Raises:
        ClusterError: a daemon of Ray ended.
    """
    answers: list[Answer] = []
    for ref in answered(refs, deadline):
        try:
            answers.append(Answer(ref, ray.get(ref, timeout=max(_FETCH_S, deadline - time.monotonic())), None))
        except GetTimeoutError:
            break
        except RayError as error:
            answers.append(Answer(ref, None, error))
    return answers


def answered(refs: list[ray.ObjectRef], deadline: float) -> list[ray.ObjectRef]:
    """Return the references with an answer once there are any; [] at the `time.monotonic()` time `deadline`.

    Raises:
        ClusterError: a daemon of Ray ended.
    """
    while True:
        raise_if_ray_ended()
        left = max(0.0, deadline - time.monotonic())
        done, waiting = ray.wait(refs, timeout=min(left, _LOOK_S))
        if done:
            return [*done, *(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else [])]
        if not left:
            return []


def ask_ray(question: Callable[[], R], timeout_s: float | None = None) -> R:
    """Return the result of a function that needs an answer from Ray's GCS or this machine's raylet.

    Ray itself would wait a minute or for ever for a daemon that ended or is stopped.

    Raises:
        ClusterError: a daemon ended, or the function did not return by the deadline.
    """
    watch = current()
    if timeout_s is None:  # a GCS that is started again may be silent for placement.ray_timeout_s
        timeout_s = _ASK_S + (watch.silence_s if watch else 0.0)
    answer = BackgroundCall(question, name="ask-ray")
    deadline = time.monotonic() + timeout_s
    while not answer.wait(_LOOK_S):
        raise_if_ray_ended()
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Ray's GCS or raylet did not answer within {timeout_s:g} s", watch.logs if watch else "Ray's logs"
            )
    return answer.outcome()
