import weakref
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
