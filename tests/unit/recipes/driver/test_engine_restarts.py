"""What engines get whose ranks were started again."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver.engine_restarts import restore_engines


def calls(engine: str, *, is_published: bool = True, is_sending: bool = False, thread: Any = None) -> list[str]:
    """Return what a restart does, in order."""
    made: list[str] = []
    rollout = SimpleNamespace(run=lambda method: made.append(method.__name__))
    channel = SimpleNamespace(
        agree=lambda: made.append("agree"),
        publish_again=lambda canary: made.append("publish"),
        is_published=is_published,
        is_sending=is_sending,
    )
    canary = torch.zeros(1, 4, dtype=torch.int64)
    restore_engines(*(cast(Any, rollout), cast(Any, channel), engine, canary, thread or threading.current_thread()))
    return made


def test_an_engine_gets_the_weights_that_were_published_last():
    assert calls("hf") == ["agree", "require_weights", "publish"]


def test_weights_are_not_published_twice_where_a_publication_or_the_router_follows():
    expected = ["agree", "require_weights"]
    assert calls("hf", is_sending=True) == calls("hf", is_published=False) == calls("vllm") == expected


def test_a_batch_that_is_drawn_ahead_never_gets_other_weights_than_it_began_with():
    with pytest.raises(RoleError, match=r"the weights that this batch or evaluation began with are gone; resume"):
        calls("hf", thread=threading.Thread())
