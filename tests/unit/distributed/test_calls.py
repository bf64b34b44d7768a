import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rlpack.distributed.calls import Call, Pending


class Argument:
    """Something a call holds."""


def test_a_result_is_waited_for_once():
    waits: list[int] = []

    def wait() -> int:
        waits.append(1)
        return 3

    pending = Pending(wait)
    assert waits == []
    assert (pending.result(), pending.result(), waits) == (3, 3, [1])


def test_an_error_is_raised_by_every_request_for_the_result():
    def wait() -> int:
        raise ValueError("no")

    pending = Pending(wait)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            pending.result()


def test_a_thread_that_asks_while_another_waits_gets_the_result_too():
    waiting, released = threading.Event(), threading.Event()

    def wait() -> int:
        waiting.set()
        assert released.wait(timeout=30)
        return 3

    pending = Pending(wait)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pending.result)
        assert waiting.wait(timeout=30)
        second = threads.submit(pending.result)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        released.set()
        assert (first.result(timeout=30), second.result(timeout=30)) == (3, 3)


def test_no_result_is_made_up_for_a_wait_that_was_interrupted():
    def wait() -> int:
        raise KeyboardInterrupt

    pending = Pending(wait)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pending.result()


def test_the_arguments_of_a_call_are_let_go_once_its_result_is_there():
    argument = Argument()
    alive = weakref.ref(argument)
    pending = Pending(partial(isinstance, argument, Argument))
    del argument
    assert alive() is not None
    assert pending.result()
    assert alive() is None


def test_a_call_is_named_by_role_and_method():
    assert Call("actor", "logprobs", [()], {}).name == "actor.logprobs"
