"""Generations and publications take turns."""

import random
import threading
import time

import pytest

from rlpack.recipes.driver.engine_access import EngineAccess

DEADLINE_S = 30.0


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_no_generation_calls_an_engine_during_a_publication_and_neither_waits_for_ever():
    access, problems, calls = EngineAccess(are_concurrent=True), [], [0] * 4
    is_publishing, is_over = threading.Event(), threading.Event()

    def generate(place: int) -> None:
        delays = random.Random(place)
        while not is_over.is_set():
            with access.generation() as number:
                for _ in range(delays.randrange(8)):
                    if access.is_wanted:
                        access.wait_for_turn(number)
                    if is_publishing.is_set():
                        problems.append("a call began during a publication")
                    time.sleep(delays.random() * 1e-3)
                    if is_publishing.is_set():
                        problems.append("a publication began during a call")
                    calls[place] += 1

    threads = [in_thread(lambda place=place: generate(place)) for place in range(4)]
    for _ in range(200):
        with access.publication():
            is_publishing.set()
            time.sleep(1e-4)
            is_publishing.clear()
        time.sleep(2e-3)
    assert access.epoch == 200
    is_over.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert not problems
    assert min(calls) > 20


def test_a_generation_without_engines_waits_for_the_next_publication():
    access, seen = EngineAccess(are_concurrent=True), []

    def generate() -> None:
        with access.generation() as number:
            access.wait_for_engines(number)
            seen.append(access.epoch)

    thread = in_thread(generate)
    while not access.needs_engines:
        time.sleep(1e-3)
    assert not seen
    with access.publication():
        assert not seen
    thread.join(DEADLINE_S)
    assert seen == [1]
    assert not access.needs_engines


def test_a_generation_may_publish_itself():
    access = EngineAccess(are_concurrent=True)
    with access.generation() as number:
        with access.publication(number):
            pass
        assert access.epoch == 1


def test_an_engine_that_failed_is_known_to_all_generations_until_it_is_replaced():
    access = EngineAccess(are_concurrent=True)
    with access.generation():
        access.record_failure(2)
    with access.generation():
        assert access.failed == {2}
    access.record_replacement(num_starts=1)
    access.record_starts(1, num_ranks=3)
    assert access.failed == frozenset()


def test_engines_of_ranks_that_were_started_again_are_unusable_once():
    access = EngineAccess(are_concurrent=True)
    access.record_starts(2, num_ranks=3)
    assert access.failed == {0, 1, 2}
    access.record_replacement(num_starts=3)  # a restart within the publication
    access.record_starts(3, num_ranks=3)
    assert access.failed == frozenset()


def test_the_oldest_generation_is_the_first_that_has_not_ended():
    access = EngineAccess(are_concurrent=True)
    with access.generation() as first:
        with access.generation() as second:
            assert access.oldest == first < second
        with access.generation() as third:
            assert access.oldest == first < third
    assert access.oldest == third + 1


def test_where_one_runs_at_a_time_a_new_generation_supersedes_one_that_was_given_up():
    access = EngineAccess(are_concurrent=False)
    given_up = access.generation()
    given_up.__enter__()
    with access.generation() as number:
        assert access.oldest == number
    with access.publication():  # it waits for none
        pass


@pytest.mark.parametrize("are_concurrent", [False, True])
def test_a_block_that_fails_gives_up_its_turn(are_concurrent: bool):
    access = EngineAccess(are_concurrent=are_concurrent)
    with pytest.raises(ZeroDivisionError), access.generation():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), access.publication():
        raise ZeroDivisionError
    with access.generation(), pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    assert not access.is_wanted
