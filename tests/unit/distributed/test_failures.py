"""Which failed call explains the others, where one method is called more than once."""

import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from rlpack.distributed import failures
from rlpack.distributed.failures import (
    RankCall,
    RankPlace,
    deadline_error,
    describe_context,
    describe_error,
    error_beside_stopped,
    first_cause,
    memory_hint,
)
from rlpack.distributed.rank_processes import ProcessId


def calls_of(*names: str) -> list[RankCall]:
    """Return each `role.method` on two ranks, in the order of submission; those of the role `slow` in the background.

    Texts stand for references: `role.method order rank`.
    """
    calls = []
    for order, name in enumerate(names):
        role, method = name.split(".")
        refs: list[Any] = [f"{name} {order} {rank}" for rank in range(2)]
        calls += [RankCall(ref, role, rank, method, order, role == "slow") for rank, ref in enumerate(refs)]
    return calls


def blamed(monkeypatch: pytest.MonkeyPatch, calls: list[RankCall], noticed: Any, errors: dict[Any, RayError]) -> Any:
    """Return the reference of the call that is blamed, where those in `errors` failed and nothing else answered."""

    def get(ref: Any, timeout: float) -> None:
        raise errors[ref]

    stand_in = SimpleNamespace(wait=lambda refs, **_: ([ref for ref in refs if ref in errors], []), get=get)
    monkeypatch.setattr(failures, "ray", stand_in)
    others: list[Any] = [call.ref for call in calls if call.ref != noticed]
    cause, error = first_cause(calls, noticed, others, errors[noticed])
    assert error is errors[cause.ref]
    return cause.ref


def failure(cause: Exception) -> RayTaskError:
    return RayTaskError("a call", "its traceback", cause)


@pytest.mark.parametrize("noticed", ["one.update 1 1", "one.prepare 2 1"])
def test_of_two_calls_of_one_method_the_later_one_does_not_hide_the_failure_before_it(
    monkeypatch: pytest.MonkeyPatch, noticed: str
):
    calls = calls_of("one.prepare", "one.update", "one.prepare")
    errors: dict[Any, RayError] = {
        "one.update 1 1": failure(ValueError("cause")),
        "one.prepare 2 1": failure(RuntimeError("consequence")),
    }
    assert blamed(monkeypatch, calls, noticed, errors) == "one.update 1 1"


def test_a_value_that_does_not_arrive_is_not_the_cause_of_another_failure(monkeypatch: pytest.MonkeyPatch):
    calls = calls_of("one.prepare", "one.update")
    errors: dict[Any, RayError] = {
        "one.prepare 0 0": GetTimeoutError("its node hangs"),
        "one.update 1 1": failure(ValueError("cause")),
    }
    assert blamed(monkeypatch, calls, "one.update 1 1", errors) == "one.update 1 1"


def test_a_method_of_another_role_with_the_same_name_does_not_hide_it_either(monkeypatch: pytest.MonkeyPatch):
    calls = calls_of("reference.logprobs", "critic.values", "actor.logprobs")
    errors: dict[Any, RayError] = {
        "critic.values 1 1": failure(ValueError("cause")),
        "actor.logprobs 2 1": failure(RuntimeError("later")),
    }
    assert blamed(monkeypatch, calls, "actor.logprobs 2 1", errors) == "critic.values 1 1"


@pytest.mark.parametrize("death", [RayActorError(), OutOfMemoryError("killed by Ray's memory monitor")])
def test_a_dead_process_comes_first_and_the_background_last(monkeypatch: pytest.MonkeyPatch, death: RayError):
    calls = calls_of("slow.score", "one.update", "one.prepare")
    errors: dict[Any, RayError] = {
        "slow.score 0 0": failure(ValueError("apart")),
        "one.prepare 2 1": failure(ValueError("own")),
    }
    assert blamed(monkeypatch, calls, "slow.score 0 0", errors) == "one.prepare 2 1"
    errors["one.prepare 2 0"] = death
    assert blamed(monkeypatch, calls, "slow.score 0 0", errors) == "one.prepare 2 0"


def test_an_earlier_call_of_the_same_method_is_named_as_what_may_explain_a_lost_collective():
    calls = calls_of("one.prepare", "one.update", "one.prepare")
    unanswered = {call.ref: call for call in [calls[0], *calls[4:]]}
    text = describe_context(calls[5], failure(RuntimeError("connection closed")), unanswered, [])
    assert text == "; rank 0 had not answered one.prepare before, which may be why"
    for others in (calls[4:5], calls[2:]):  # of the same call, and of later ones
        unanswered = {call.ref: call for call in others}
        failed = calls[5] if others == calls[4:5] else calls[1]
        assert describe_context(failed, failure(RuntimeError("connection closed")), unanswered, []) == ""


def test_a_stopped_rank_is_blamed_and_not_those_that_wait_for_it():
    calls = calls_of("actor.train_step")
    error = deadline_error(calls, 5.0, {calls[1]: RankPlace(4321)})
    assert (error.role, error.rank, error.method) == ("actor", 1, "train_step")
    assert error.cause.startswith("no answer within 5 s, because process 4321 (rank 1) is stopped")
    assert "; rank 0 waits for it in a collective; " in error.cause
    background = calls_of("slow.score")
    assert "collective" not in deadline_error(background, 5.0, {background[1]: RankPlace(4321)}).cause


def test_a_stopped_rank_is_blamed_for_the_failure_of_one_that_waits_for_it():
    calls = calls_of("actor.start")
    error = error_beside_stopped(
        calls[0], failure(RuntimeError("timed out in a collective")), {calls[1]: RankPlace(4321)}
    )
    assert (error.role, error.rank, error.method) == ("actor", 1, "start")
    assert error.cause.startswith("no answer, because process 4321 (rank 1) is stopped")
    assert "role actor failed on rank 0 in start: RuntimeError: timed out in a collective" in error.cause


def test_a_call_with_a_deadline_of_its_own_advises_no_setting():
    error = deadline_error(calls_of("rollout.advance")[1:], 31.0, is_own=True)
    assert str(error) == (
        "role rollout, rank 1, in advance: no answer from rank 1 within 31 s; the process hangs: the call should "
        "have ended by itself long before"
    )


def test_a_process_on_another_node_is_named_with_its_node_where_its_log_is():
    here, there = RankPlace(4321), RankPlace(4321, "10.0.0.2")
    log = "says why (out of memory, a signal, a crash)"
    for place in (None, here):
        text = describe_error(RayActorError(), place)
        assert text == f"the process died; its log, in the Ray session's logs folder, {log}"
    text = f"process 4321 on node 10.0.0.2 died; its log, in the Ray session's logs folder on that node, {log}"
    assert describe_error(RayActorError(), there) == text
    assert describe_error(failure(RayActorError()), there).endswith(f"got data from has ended: {text}")
    killed = describe_error(OutOfMemoryError("killed"), there)
    assert killed.startswith("process 4321 on node 10.0.0.2 was killed by Ray's memory monitor, since its node ran out")


@pytest.mark.parametrize(
    ("role", "hint"),
    [
        ("actor", "lower batching.max_tokens, or set actor.gradient_checkpointing=full; more under "),
        ("reference", "lower batching.max_tokens; more under "),
        ("rollout", "lower rollout.max_num_seqs; more under "),
        ("own", "more under "),
    ],
)
def test_a_full_gpu_names_the_keys_that_save_memory_of_its_role(role: str, hint: str):
    full = failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert memory_hint(role, full) == f'{hint}"If a GPU runs out of memory" in the guide'
    assert memory_hint(role, failure(RuntimeError("out of memory"))) is None


def test_a_late_or_stopped_process_on_another_node_is_named_with_its_node():
    calls, there = calls_of("actor.train_step"), RankPlace(4321, "10.0.0.2")
    stopped = deadline_error(calls, 5.0, {calls[0]: RankPlace(1234), calls[1]: there}).cause
    assert "because process 1234 (rank 0), 4321 (rank 1) on node 10.0.0.2 is stopped" in stopped
    late = deadline_error(calls[1:], 5.0, place=there).cause
    assert late.startswith("no answer from rank 1 (process 4321 on node 10.0.0.2) within 5 s; raise ")
    assert deadline_error(calls[1:], 5.0, place=RankPlace(4321)).cause.startswith("no answer from rank 1 within 5 s;")
    assert deadline_error(calls, 5.0, place=there).cause.startswith("no answer from ranks 0, 1 within 5 s;")


def test_a_process_is_stopped_only_between_stop_and_continue():
    child = subprocess.Popen(["sleep", "30"])
    try:
        process = ProcessId(child.pid, psutil.Process(child.pid).create_time())
        for sent, expected in ((signal.SIGSTOP, True), (signal.SIGCONT, False), (signal.SIGSTOP, True)):
            child.send_signal(sent)
            deadline = time.monotonic() + 10
            while process.is_stopped() != expected and time.monotonic() < deadline:
                time.sleep(0.01)
            assert process.is_stopped() == expected
        reused = ProcessId(child.pid, process.started - 60)
        assert not reused.is_stopped()
        reused.kill()
        assert child.poll() is None
        process.kill()
        assert child.wait(10) == -signal.SIGKILL
        assert not process.is_stopped()
    finally:
        child.kill()
        child.wait(10)
