"""Which failure of a rank explains the others, and how its error reads."""

import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType

import ray
import torch
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from rlpack.distributed.errors import RankError, RoleError

# Neighbors of a rank that dies in a collective may fail a moment before its death is known; wait this long for it.
_CAUSE_GRACE_S = 1.0

# What Ray raises for a process that ended; one that its memory monitor killed has an error without the actor's id.
DEATHS = (RayActorError, OutOfMemoryError)

# Roles that run microbatches of the batching section, and the trained ones of them.
_WITH_BATCHES, _TRAINED = ("actor", "critic", "reference", "reward_model"), ("actor", "critic")

# Submission order of all calls of this process, across pools.
_ORDER = count()


@dataclass(frozen=True)
class RankCall:
    """A call under way on one rank.

    Attributes:
        ref: reference to the result.
        role: name of the role.
        rank: the rank that runs it.
        method: name of the method.
        order: place in the order of submission, in which a rank runs its calls; the same on all ranks of a call.
        background: whether it runs in a thread, while the rank answers other calls.
        starts: whether it may start an engine.
    """

    ref: ray.ObjectRef
    role: str
    rank: int
    method: str
    order: int
    background: bool = False
    starts: bool = False


@dataclass(frozen=True)
class RankPlace:
    """The process of a rank.

    Attributes:
        pid: its id, on its own node.
        address: the address of its node; None for that of the driver.
    """

    pid: int
    address: str | None = None

    @property
    def on_node(self) -> str:
        """Return ` on node ADDRESS`; nothing for the driver's node."""
        return "" if self.address is None else f" on node {self.address}"


def rank_calls(
    refs: Sequence[ray.ObjectRef],
    role: str,
    method: str,
    *,
    ranks: Sequence[int] | None = None,
    background: bool = False,
    starts: bool = False,
) -> list[RankCall]:
    """Return a `RankCall` for each reference just submitted, with the next submission number.

    `ranks` are the ranks that run them; None for 0, 1, …
    """
    order = next(_ORDER)
    numbered = zip(range(len(refs)) if ranks is None else ranks, refs, strict=True)
    return [RankCall(ref, role, rank, method, order, background, starts) for rank, ref in numbered]


def is_death(error: BaseException | None) -> bool:
    """Return whether an error says that a process ended: one that was called, or one that a call depended on."""
    return isinstance(error, DEATHS)


def first_cause(
    calls: Sequence[RankCall], failed: ray.ObjectRef, pending: list[ray.ObjectRef], error: RayError
) -> tuple[RankCall, RayError]:
    """Return call and error of the failure that explains the others.

    Priority: process death, then the failure of the call submitted first (an export precedes its loads; foreground
    precedes background). A dead process fails all of its calls; a foreground call is reported if there is one.

    Args:
        calls: all calls under way.
        failed: the call whose failure was noticed.
        pending: the other calls that have not answered.
        error: what `failed` raised.
    """
    failures = {failed: error}
    for ref in ray.wait(pending, num_returns=len(pending), timeout=_CAUSE_GRACE_S)[0] if pending else []:
        try:
            ray.get(ref, timeout=_CAUSE_GRACE_S)
        except GetTimeoutError:  # its node doesn't deliver the value; the failure is elsewhere
            continue
        except RayError as other:
            failures[ref] = other
    in_background = {f"{call.role}.{call.method}" for call in calls if call.background}

    def precedence(call: RankCall) -> tuple[bool, bool, int, bool]:
        died = is_death(failures[call.ref])
        return not died, f"{call.role}.{call.method}" in in_background, call.order, call.ref != failed

    cause = min((call for call in calls if call.ref in failures), key=precedence)
    return cause, failures[cause.ref]


def describe_error(error: RayError, place: RankPlace | None = None) -> str:
    """Describe an error in one line: for an exception of a task, with its type and its place in a user's code.

    `place` is that of the process that died, if it is known.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, DEATHS):
        return f"a process that the call got data from has ended: {describe_error(error.cause, place)}"
    if isinstance(error, RayTaskError):
        known = isinstance(error.cause, RankError)
        text = str(error.cause) if known else f"{type(error.cause).__name__}: {error.cause}"
        line = place_in_user_code(str(error))  # which contains the traceback
        return text if line in text else text + line
    on_node = "" if place is None else place.on_node
    process = f"process {place.pid}{on_node}" if place is not None and on_node else "the process"
    if isinstance(error, OutOfMemoryError):
        return (
            f"{process} was killed by Ray's memory monitor, since its node ran out of memory; place fewer ranks or "
            "smaller batches there, end other programs, or raise Ray's limit (RAY_memory_usage_threshold, a share of "
            "the node's memory, in the environment of the node's Ray)"
        )
    if isinstance(error, RayActorError):
        folder = f"the Ray session's logs folder{' on that node' if on_node else ''}"
        return f"{process} died; its log, in {folder}, says why (out of memory, a signal, a crash)"
    return f"{type(error).__name__}: {error}"


def role_error(call: RankCall, cause: RayError, text: str) -> RoleError:
    """Return the error for a failed call, with the exception that the role raised, if any, and a hint if one helps."""
    error = RoleError(call.role, call.rank, call.method, text)
    error.hint = memory_hint(call.role, cause)
    if isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
        error.original = cause.cause
    return error


def memory_hint(role: str, error: RayError) -> str | None:
    """Return what saves memory if a GPU is full; None for any other error."""
    if not isinstance(error, RayTaskError) or not isinstance(error.cause, torch.OutOfMemoryError):
        return None
    more = 'more under "If a GPU runs out of memory" in the guide'
    if role == "rollout":
        return f"lower rollout.max_num_seqs; {more}"
    if role not in _WITH_BATCHES:
        return more
    checkpointing = f", or set {role}.gradient_checkpointing=full" if role in _TRAINED else ""
    return f"lower batching.max_tokens{checkpointing}; {more}"


def describe_context(
    call: RankCall, cause: RayError, submitted: Mapping[ray.ObjectRef, RankCall], in_background: Sequence[str]
) -> str:
    """Return other possible explanations of a failure: calls that were under way.

    Args:
        call: the call that failed.
        cause: its error.
        submitted: calls that have not answered, in the order of submission; later ones explain nothing.
        in_background: names of the calls that run in threads.
    """
    earlier = [other for other in submitted.values() if other.order < call.order]
    # torch raises a RuntimeError from a collective in which a rank is missing.
    if earlier and isinstance(cause, RayTaskError) and isinstance(cause.cause, RuntimeError):
        first = earlier[0]
        return f"; rank {first.rank} had not answered {first.role}.{first.method} before, which may be why"
    if is_death(cause) and in_background:
        return f"; under way in the background: {', '.join(dict.fromkeys(in_background))}"
    return ""


def deadline_error(
    calls: Sequence[RankCall],
    timeout_s: float,
    stopped: Mapping[RankCall, RankPlace] = MappingProxyType({}),
    *,
    place: RankPlace | None = None,
    is_own: bool = False,
) -> RoleError:
    """Return the error for calls that missed their deadline.

    Args:
        calls: the calls.
        timeout_s: how long each was waited for.
        stopped: those whose processes are stopped, with these. They explain the others.
        place: the process of the first call.
        is_own: whether the deadline belongs to the calls themselves rather than to a setting.
    """
    if stopped:
        first = next(iter(stopped))
        waiting = sorted({call.rank for call in calls if call.role == first.role and call not in stopped})
        in_collective = bool(waiting) and not first.background
        wait = "waits" if len(waiting) == 1 else "wait"
        others = f"; {_ranks(waiting)} {wait} for it in a collective" if in_collective else ""
        return _stopped_error(f"no answer within {timeout_s:g} s", stopped, others)
    numbers = sorted({call.rank for call in calls if call.role == calls[0].role})
    ranks = _ranks(numbers)
    way_out = (
        "the process hangs: the call should have ended by itself long before"
        if is_own
        else "raise placement.call_timeout_s or placement.start_timeout_s if the work takes longer"
    )
    if len(numbers) == 1 and place is not None and place.on_node:
        ranks += f" (process {place.pid}{place.on_node})"
    cause = f"no answer from {ranks} within {timeout_s:g} s; {way_out}"
    return RoleError(calls[0].role, calls[0].rank, calls[0].method, cause)


def lost_node_error(late: RankCall, timeout_s: float, pool: str, ranks_of: Mapping[str, Sequence[int]]) -> RoleError:
    """Return the error for a pool that can't be started again, since no node took the place of lost ones.

    Args:
        late: a call that missed its deadline.
        timeout_s: how long it was waited for.
        pool: name of the pool.
        ranks_of: its ranks on each lost node, by the node's address.
    """
    lost = " and ".join(
        f"node {address}, which had {_ranks(ranks)} of pool {pool}," for address, ranks in ranks_of.items()
    )
    is_one = len(ranks_of) == 1
    cause = (
        f"{lost} {'is' if is_one else 'are'} lost, and no other had room within {timeout_s:g} s; add "
        f"{'a node' if is_one else 'nodes'}, then continue with resume=auto"
    )
    return RoleError(late.role, late.rank, late.method, cause)


def error_beside_stopped(call: RankCall, cause: RayError, stopped: Mapping[RankCall, RankPlace]) -> RoleError:
    """Return the error for a call that failed while the processes of others are stopped, which explains it.

    Args:
        call: the call that failed, as in a collective that the others don't reach.
        cause: its error.
        stopped: the other calls, with their processes.
    """
    failed = f"; meanwhile role {call.role} failed on rank {call.rank} in {call.method}: {describe_error(cause)}"
    return _stopped_error("no answer", stopped, failed)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _stopped_error(silence: str, stopped: Mapping[RankCall, RankPlace], others: str) -> RoleError:
    """Return the error for processes that are stopped; `others` says what that did to other ranks."""
    first = next(iter(stopped))
    own = [(call.rank, place) for call, place in stopped.items() if call.role == first.role]
    names = ", ".join(f"{place.pid} (rank {rank}){place.on_node}" for rank, place in own)
    return RoleError(
        first.role,
        first.rank,
        first.method,
        f"{silence}, because process {names} is stopped, by SIGSTOP, a debugger or a scheduler{others}; what stops a "
        f"process has to resume it (kill -CONT) before the deadline",
    )


def place_in_user_code(trace: str) -> str:
    """Return the last line of a traceback in neither rlpack, an installed package nor the standard library."""
    ours = [str(Path(__file__).parents[1]), str(Path(__file__).resolve().parents[1])]  # may be a symbolic link
    others = (*ours, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    frames = [frame for frame in re.findall(r'File "(.+?)", line (\d+)', trace) if not frame[0].startswith(others)]
    return " ({}, line {})".format(*frames[-1]) if frames else ""
