"""What a pool does after a death, without Ray: a test says what its ranks answer."""

import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from rlpack.background_call import BackgroundCall
from rlpack.distributed import answers, restartable_pool
from rlpack.distributed.answers import Answer
from rlpack.distributed.calls import Call
from rlpack.distributed.errors import RoleError
from rlpack.distributed.failures import RankCall, RankPlace
from rlpack.distributed.first_failure import FirstFailure
from rlpack.distributed.ranks import RayRanks
from rlpack.distributed.restartable_pool import LostRanksError
from rlpack.distributed.restarts import Restarts
from rlpack.distributed.submitted import SubmittedCall, SubmittedCalls
from rlpack.distributed.usage import UsageLog

MEMORY = "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.2) was 0.96 ..."


class Processes:
    """The processes of a pool of two ranks; records what is done to them."""

    name, roles, processes, actors = "generation", ("rollout",), None, ()

    def __init__(self) -> None:
        self.done: list[str] = []
        self.places: dict[str, RankPlace] = {}
        self.lost: dict[str, list[int]] = {}

    def kill(self) -> None:
        self.done.append("kill")

    def start_again(self, finish: Any) -> None:
        self.done.append("start again")

    def has_had(self, actor_id: str) -> bool:
        return actor_id == "rank 1"

    def place_of_actor(self, actor_id: str) -> RankPlace | None:
        return self.places.get(actor_id)

    def place_of(self, rank: int) -> RankPlace | None:
        return self.places.get(f"rank {rank}")

    def lost_nodes(self) -> dict[str, list[int]]:
        return self.lost

    def rank_of(self, actor_id: str) -> int | None:
        return 1 if actor_id == "rank 1" else None


def pool_of(processes: Processes, *, is_restartable: bool = True) -> RayRanks:
    ranks = RayRanks.__new__(RayRanks)
    ranks.is_restartable, ranks.num_starts, ranks._is_ended, ranks._is_restarting = is_restartable, 1, False, False
    ranks._pool, ranks._store = cast(Any, processes), Mock(producer_of=lambda error: None)
    ranks._restarts, ranks._after_restart, ranks._submitted = Restarts(), {}, SubmittedCalls()
    ranks._submitting, ranks._call_s, ranks._start_s, ranks._usage = threading.RLock(), 60.0, 60.0, UsageLog()
    ranks._failure, ranks._num_loading = FirstFailure(), 0
    return ranks


def died(actor: str = "rank 1") -> ActorDiedError:
    error = ActorDiedError()
    error.actor_id = actor
    return error


def call_of_rank(rank: int, role: str = "rollout") -> RankCall:
    return RankCall(cast(Any, f"reference {rank}"), role, rank, "generate", 0)


@pytest.mark.parametrize(
    ("error", "text"),
    [(died(), "the process died; "), (OutOfMemoryError(MEMORY), "the process was killed by Ray's memory monitor, ")],
)
@pytest.mark.parametrize("role", ["rollout", "pool generation"])
def test_a_pool_that_can_be_started_again_is_so_after_each_kind_of_death(
    monkeypatch: pytest.MonkeyPatch, error: RayError, text: str, role: str
):
    processes, call = Processes(), call_of_rank(1, role)
    monkeypatch.setattr(restartable_pool, "arrived", lambda refs, deadline: [Answer(call.ref, None, error)])
    with pytest.raises(LostRanksError) as lost:
        pool_of(processes)._wait([call], 60.0)
    assert (lost.value.error.role, lost.value.error.rank, processes.done) == (role, 1, [])
    assert lost.value.error.cause.startswith(text)
    assert "\n" not in str(lost.value.error)
    with pytest.raises(RoleError, match="resume=auto continues from the newest checkpoint"):
        pool_of(processes, is_restartable=False)._wait([call], 60.0)
    assert processes.done == ["kill"]


@pytest.mark.parametrize("is_restartable", [True, False])
def test_a_pool_that_was_ended_for_a_failure_raises_it_in_other_threads_too(
    monkeypatch: pytest.MonkeyPatch, is_restartable: bool
):
    processes, call = Processes(), call_of_rank(1)
    pool = pool_of(processes, is_restartable=is_restartable)
    failure = RayTaskError("measure", "its traceback", ValueError("the key was rejected")).as_instanceof_cause()
    monkeypatch.setattr(restartable_pool, "arrived", lambda refs, deadline: [Answer(call.ref, None, failure)])
    with pytest.raises(RoleError, match="ValueError: the key was rejected") as first:
        pool._wait([call], 60.0)
    assert processes.done == ["kill"]
    # Another thread sees that the processes are gone.
    monkeypatch.setattr(restartable_pool, "arrived", lambda refs, deadline: [Answer(call.ref, None, died())])
    with pytest.raises(RoleError) as second:
        pool._wait([call], 60.0)
    assert (str(second.value), second.value.__cause__) == (str(first.value), failure)
    second.value.phase, second.value.step = "train", 3  # its thread's
    with pytest.raises(RoleError) as third:
        pool._start_again(LostRanksError(RoleError("rollout", 1, "generate", "the process died"), {pool}), 1)
    assert (str(third.value), third.value.__cause__) == (str(first.value), failure)
    assert isinstance(first.value.original, ValueError)
    assert third.value.original is first.value.original


@pytest.mark.parametrize("error", [died(), OutOfMemoryError(MEMORY)])
def test_a_death_on_another_node_names_the_process_and_the_node(monkeypatch: pytest.MonkeyPatch, error: RayError):
    processes, call = Processes(), call_of_rank(1)
    processes.places = {"rank 0": RankPlace(7), "rank 1": RankPlace(4321, "10.0.0.2")}
    monkeypatch.setattr(restartable_pool, "arrived", lambda refs, deadline: [Answer(call.ref, None, error)])
    with pytest.raises(LostRanksError, match=r"in generate: process 4321 on node 10\.0\.0\.2 (died|was killed)"):
        pool_of(processes)._wait([call], 60.0)


def test_a_deadline_on_another_node_names_the_process_and_the_node(monkeypatch: pytest.MonkeyPatch):
    processes, call = Processes(), call_of_rank(1)
    processes.places = {"rank 1": RankPlace(4321, "10.0.0.2")}
    monkeypatch.setattr(restartable_pool, "arrived", lambda refs, deadline: [])
    with pytest.raises(LostRanksError, match=r"no answer from rank 1 \(process 4321 on node 10\.0\.0\.2\) within 60 s"):
        pool_of(processes)._wait([call], 60.0)


def test_a_death_outside_of_the_pool_is_no_death_of_its_rank(monkeypatch: pytest.MonkeyPatch):
    """A rank raises it for a process whose rows it was to get."""
    processes, call = Processes(), call_of_rank(1)
    for cause in (died("another"), OutOfMemoryError(MEMORY)):
        error = RayTaskError("measure", "its traceback", cause).as_instanceof_cause()
        answer = Answer(call.ref, None, error)
        monkeypatch.setattr(restartable_pool, "arrived", lambda refs, deadline, answer=answer: [answer])
        with pytest.raises(RoleError, match="a process that the call got data from has ended: the process "):
            pool_of(processes)._wait([call], 60.0)
    assert processes.done == ["kill", "kill"]


def test_a_call_behind_one_that_starts_an_engine_has_time_for_the_start(monkeypatch: pytest.MonkeyPatch):
    pool, last = pool_of(Processes()), replace(call_of_rank(1), order=1)
    starting = replace(call_of_rank(0), method="replace_failed_engine", starts=True)
    submitted = SubmittedCall(Call("rollout", "replace_failed_engine", [()] * 2, {}, starts=True), 7)
    pool._submitted.record_start(submitted, [starting])
    pool._submitted.add(submitted)
    pool._start_s, limits = 500.0, list[float]()

    def arrive(refs: list[Any], deadline: float) -> list[Answer]:
        limits.append(deadline - time.monotonic())
        return [Answer(refs[0], "done", None)]

    monkeypatch.setattr(restartable_pool, "arrived", arrive)
    with pool._submitted.awaiting(submitted):  # by another thread
        assert pool._wait([last], 60.0) == ["done"]
    assert limits == [pytest.approx(560.0, abs=5), pytest.approx(60.0, abs=5)]


def test_answers_that_arrive_together_are_read_together(monkeypatch: pytest.MonkeyPatch):
    """With a request to Ray for each of n answers, each about all that are left, a wait would take n² time."""
    waits: list[int] = []

    def wait(refs: list[Any], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        waits.append(len(refs))
        return refs[:num_returns], refs[num_returns:]

    monkeypatch.setattr(answers, "ray", SimpleNamespace(wait=wait, get=lambda ref, timeout: f"answer to {ref}"))
    calls = [call_of_rank(rank) for rank in range(64)]
    assert pool_of(Processes())._wait(calls, 60.0) == [f"answer to reference {rank}" for rank in range(64)]
    assert waits == [64, 63]


@pytest.mark.parametrize("end", [RayRanks.end, RayRanks.kill])
def test_a_thread_that_waits_when_the_run_ends_does_not_start_the_pool_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: Any
):
    processes, call, ended = Processes(), call_of_rank(0), threading.Event()
    ranks = pool_of(processes)
    submitted = SubmittedCall(Call("rollout", "generate", [()], {}), 0, [call])

    def answer(refs: Any, deadline: float) -> list[Answer]:
        assert ended.wait(30)
        return [Answer(call.ref, None, died())]

    monkeypatch.setattr(restartable_pool, "arrived", answer)
    waits = BackgroundCall(lambda: ranks._result(submitted), name="draw")
    end(ranks)
    ended.set()
    assert waits.wait(30)
    with pytest.raises(RoleError, match="in generate: the process died"):
        waits.outcome()
    assert "start again" not in processes.done
    assert not caplog.records


def test_a_pool_that_ends_while_it_is_started_again_is_killed(monkeypatch: pytest.MonkeyPatch):
    processes = Processes()
    ranks = pool_of(processes)
    monkeypatch.setattr(processes, "start_again", lambda finish: ranks.end())
    with pytest.raises(RoleError, match="the process died"):
        ranks._start_again(LostRanksError(RoleError("rollout", 1, "generate", "the process died"), {ranks}), 1)
    assert processes.done == ["kill"]


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (
            {"10.0.0.2": [0, 1]},
            "node 10.0.0.2, which had ranks 0, 1 of pool generation, is lost, and no other had room within "
            "60 s; add a node, then continue with resume=auto",
        ),
        (
            {"10.0.0.2": [0], "10.0.0.3": [1]},
            "node 10.0.0.2, which had rank 0 of pool generation, and node 10.0.0.3, which had rank 1 of pool "
            "generation, are lost, and no other had room within 60 s; add nodes, then continue with resume=auto",
        ),
        (
            {},
            "no answer from rank 1 within 60 s; raise placement.call_timeout_s or placement.start_timeout_s if the "
            "work takes longer",
        ),
    ],
)
def test_a_pool_that_waits_for_the_place_of_a_lost_node_says_so(
    monkeypatch: pytest.MonkeyPatch, lost: dict[str, list[int]], text: str
):
    processes, call = Processes(), call_of_rank(1, "pool generation")
    processes.lost = lost
    ranks = pool_of(processes)
    monkeypatch.setattr(restartable_pool, "arrived", lambda refs, deadline: [])
    monkeypatch.setattr(processes, "start_again", lambda finish: ranks._wait([call], 60.0))
    with pytest.raises(RoleError) as missed:
        ranks._start_again(LostRanksError(RoleError("rollout", 1, "generate", "the process died"), {ranks}), 1)
    assert missed.value.cause == text
    assert processes.done[-1] == "kill"


class Scorer:
    """A rank whose background call ends after it was asked `asks` times; notes how long it was to wait each time."""

    def __init__(self, asks: int) -> None:
        self.asks, self.waits, self.discard = asks, list[float](), Mock()
        self.result = SimpleNamespace(remote=self._answer)

    def _answer(self, call_id: int, wait_s: float) -> str | float:
        self.waits.append(wait_s)
        return "rows" if len(self.waits) == self.asks else math.inf


@pytest.mark.parametrize("others", ["none", "an engine's call", "another background call", "a relay"])
def test_ranks_wait_for_a_background_call_only_while_the_pool_has_no_other(
    monkeypatch: pytest.MonkeyPatch, others: str
):
    pool, scorer, pauses = pool_of(Processes()), Scorer(asks=4), list[float]()
    monkeypatch.setattr("rlpack.distributed.ranks.rank_calls", lambda refs, *_, ranks: [Mock(rank=0, answer=refs[0])])
    monkeypatch.setattr("rlpack.distributed.ranks.time.sleep", pauses.append)
    monkeypatch.setattr(pool, "_wait", lambda asked, timeout_s: [getattr(one, "answer", None) for one in asked])
    score = SubmittedCall(Call("reward", "score", [()], {}, background=True), 1, actors=[scorer])
    score.calls = [call_of_rank(0, "reward")]
    if others == "a relay":
        pool._num_loading = 1
    elif others != "none":
        is_background = others == "another background call"
        other = SubmittedCall(Call("rollout", "advance", [()], {}, background=is_background), 2)
        other.calls = [call_of_rank(0)]
        pool._submitted.add(other)
    monkeypatch.setattr(pool, "_store_rows", lambda submitted, rows: rows)
    monkeypatch.setattr(pool._usage, "unwrap", lambda role, method, results, limit_s: results)
    assert pool._result(replace(score, call=replace(score.call, returns_rows=True))) == {0: "rows"}
    if others == "none":
        assert (len(set(scorer.waits)), min(scorer.waits) > 0, pauses) == (1, True, [])
    else:
        assert scorer.waits == [0.0] * 4  # a call of the engine waits for none of them
        assert len(pauses) == 3
        assert all(0 < pause <= 0.1 for pause in pauses)


@pytest.mark.parametrize(("ended_ago", "is_late"), [([0.05] * 8, False), ([0.05, 0.2, 0.4, 0.6, 0.8], True)])
def test_a_background_call_has_its_deadline_from_the_last_one_that_ended_before_it_collected_or_not(
    monkeypatch: pytest.MonkeyPatch, ended_ago: list[float], is_late: bool
):
    pool, answers = pool_of(Processes()), iter([*ended_ago, "rows"])
    pool._call_s = 0.3
    monkeypatch.setattr("rlpack.distributed.ranks.rank_calls", lambda refs, *_, ranks: [Mock(rank=0, answer=refs[0])])

    def wait(asked: list[Any], timeout_s: float) -> list[Any]:
        time.sleep(0.1)
        return [one.answer for one in asked]

    monkeypatch.setattr(pool, "_wait", wait)
    monkeypatch.setattr(pool, "_missed", lambda late, limit_s, pools: TimeoutError(f"{len(late)} late"))
    scorer = SimpleNamespace(result=SimpleNamespace(remote=lambda call_id, wait_s: next(answers)))
    score = SubmittedCall(Call("reward", "score", [()], {}, background=True), 1, actors=[scorer])
    score.calls = [call_of_rank(0, "reward")]
    with pool._submitted.awaiting(score):
        if is_late:
            with pytest.raises(TimeoutError, match="1 late"):
                pool._background_results(score)
        else:
            assert pool._background_results(score) == ["rows"]


def test_a_call_that_another_thread_has_started_again_is_not_started_twice_and_its_ranks_are_not_restarted(
    monkeypatch: pytest.MonkeyPatch,
):
    pool = pool_of(Processes())
    started, restarts = list[int](), list[LostRanksError]()
    submitted = SubmittedCall(Call("rollout", "generate", [()], {}), 1, num_starts=1)

    def collect(taken: SubmittedCall) -> list[str]:
        if taken.num_starts == 2:
            return ["rows"]
        pool.num_starts = submitted.num_starts = 2  # another thread restarts the ranks, and starts the call again
        raise LostRanksError(RoleError("rollout", 0, "generate", "the process died"), {pool})

    monkeypatch.setattr(pool, "_collect", collect)
    monkeypatch.setattr(pool, "_restart", restarts.append)
    monkeypatch.setattr(pool, "_start", lambda call: started.append(call.call_id))
    assert pool._result(submitted) == ["rows"]
    assert (started, restarts) == ([], [])


def test_of_the_functions_with_one_key_the_last_runs_after_a_restart_before_calls_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
):
    pool, done = pool_of(Processes()), list[str]()
    monkeypatch.setattr(pool._pool, "start_again", lambda finish: done.append("processes"), raising=False)
    monkeypatch.setattr(pool._pool, "name", "scorers", raising=False)
    monkeypatch.setattr(pool, "_start", lambda submitted: done.append(submitted.call.method))
    pool.after_restart("weights", lambda: done.append("old weights"))
    pool.after_restart("other", lambda: done.append("other"))
    pool.after_restart("weights", lambda: done.append("new weights"))
    pool._submitted.add(SubmittedCall(Call("reward", "score", [()], {}), 1))
    pool._start_again(LostRanksError(RoleError("reward", 0, "score", "the process died"), {pool}), num_starts=1)
    assert done == ["processes", "other", "new weights", "score"]
