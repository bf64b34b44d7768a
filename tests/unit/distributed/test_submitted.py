"""Which calls hold up another one, and what is left of calls that are discarded."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rlpack.distributed.calls import Call
from rlpack.distributed.failures import RankCall
from rlpack.distributed.submitted import SubmittedCall, SubmittedCalls


def parts(name: str, order: int, num_ranks: int = 2) -> list[RankCall]:
    """Return a call on each rank; strings stand in for references."""
    refs: list[Any] = [f"{name} {rank}" for rank in range(num_ranks)]
    return [RankCall(ref, "echo", rank, name, order) for rank, ref in enumerate(refs)]


def submitted(*names: str) -> SubmittedCalls:
    calls = SubmittedCalls()
    for order, name in enumerate(names):
        call = Call("echo", name, [()] * 2, {}, background=name.startswith("slow"))
        started = SubmittedCall(call, 100 + order)
        calls.record_start(started, parts(name, order))
        calls.add(started)
    return calls


def test_only_calls_that_were_submitted_before_one_that_is_waited_for_hold_it_up():
    calls = submitted("first", "second", "third")
    with calls.awaiting(calls.all()[1]):  # by another thread
        assert list(calls.before(parts("second", 1))) == ["first 0", "first 1"]
        others = [f"{name} {rank}" for name in ("first", "second", "third") for rank in range(2)]
        assert list(calls.before(parts("fourth", 3))) == others
    assert list(calls.before(parts("fourth", 3))) == ["first 0", "first 1", "third 0", "third 1"]
    assert calls.before([]) == {}


def test_of_calls_to_single_ranks_only_those_of_the_same_rank_hold_one_up():
    calls = submitted("first")
    for order, rank in ((1, 0), (2, 1)):
        one = SubmittedCall(Call("echo", "alone", [()], {}, ranks=(rank,)), 200 + rank)
        calls.record_start(one, parts("alone", order)[rank : rank + 1])
        calls.add(one)
    assert list(calls.before(parts("last", 3)[:1])) == ["first 0", "first 1", "alone 0"]
    assert list(calls.before(parts("last", 3))) == ["first 0", "first 1", "alone 0", "alone 1"]


def test_a_rank_that_has_answered_holds_nothing_up():
    calls = submitted("first", "second")
    calls.record_answer(parts("first", 0)[1])
    assert list(calls.before(parts("third", 2))) == ["first 0", "second 0", "second 1"]


def test_calls_that_are_waited_for_count_until_they_have_ended():
    calls = submitted("slow")
    own = calls.all()[0]
    assert (calls.has_others(own), calls.num_awaited_in_background()) == (False, 0)
    with calls.awaiting(own):
        assert (calls.has_others(own), calls.num_awaited_in_background()) == (False, 1)
        other = SubmittedCall(Call("echo", "fast", [()], {}), 300)
        with calls.awaiting(other):
            assert (calls.has_others(own), calls.num_awaited_in_background()) == (True, 1)
    assert (calls.has_others(own), calls.num_awaited_in_background()) == (False, 0)


def test_of_discarded_calls_nothing_is_left():
    calls = submitted("first", "slow")
    assert calls.names_in_background() == ["echo.slow"]
    discarded = calls.pop_own()
    assert [(call_id, one.call.name) for call_id, one in discarded.items()] == [(100, "echo.first"), (101, "echo.slow")]
    assert (calls.pop_own(), calls.before(parts("third", 2)), calls.names_in_background()) == ({}, {}, [])


def test_a_thread_discards_no_call_of_another_one():
    calls = submitted("first")
    with ThreadPoolExecutor(1) as other:
        assert other.submit(calls.pop_own).result(timeout=10) == {}
    assert list(calls.before(parts("second", 1))) == ["first 0", "first 1"]


def test_calls_of_ranks_that_ended_hold_nothing_up_and_are_repeated_in_order():
    calls = submitted("first", "slow", "third")
    with calls.awaiting(calls.all()[0]):  # its caller repeats it
        dependent = SubmittedCall(Call("echo", "dependent", [()], {}, ranks=(0,), of_start=1), 200)
        calls.add(dependent)
        calls.forget_parts()
        assert calls.before(parts("fourth", 3)) == {}
        assert [one.call.name for one in calls.all()] == ["echo.slow", "echo.third"]
        calls.record_start(calls.all()[1], parts("third", 7))
        assert list(calls.before(parts("fourth", 8))) == ["third 0", "third 1"]


def test_ranks_are_busy_while_another_threads_foreground_call_is_in_progress():
    calls = submitted("slow", "first")  # two ranks, of which the second call needs the first
    first = calls.all()[1]
    first.call = replace(first.call, ranks=(0,))
    assert not calls.keeps_busy(0), "a thread knows of its own calls"
    with ThreadPoolExecutor(1) as other:
        assert [other.submit(calls.keeps_busy, rank).result(timeout=10) for rank in range(2)] == [True, False]
        with calls.awaiting(first):
            assert other.submit(calls.keeps_busy, 0).result(timeout=10)
        assert not other.submit(calls.keeps_busy, 0).result(timeout=10)


class CountedDict(dict[Any, Any]):
    """Counts how often it is read."""

    reads = 0

    def values(self) -> Any:
        self.reads += 1
        return super().values()

    def pop(self, *args: Any) -> Any:
        self.reads += 1
        return super().pop(*args)


def test_calls_that_hold_nothing_up_are_not_searched():
    """A step has thousands of scoring calls, so reading each of them for each of them would take minutes."""
    calls = submitted("first", "second", *["slow"] * 20)
    for one in calls.all():
        one.unfinished = CountedDict(one.unfinished)
    calls.record_answer(parts("first", 0)[0])
    assert list(calls.before(parts("second", 1))) == ["first 1"]
    assert [one.unfinished.reads for one in calls.all()] == [2, *[0] * 21]
