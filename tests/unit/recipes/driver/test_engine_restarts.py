"""What engines get whose ranks were started again."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlpack.config.schema import Rollout, Trainer
from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver.engine_restarts import keep_weights, restore_engines
from tests.builders import tiny_config


def calls(
    engine: str, *, is_published: bool = True, is_sending: bool = False, keeps: bool = False, thread: Any = None
) -> list[str]:
    """Return what a restart does, in order."""
    made: list[str] = []
    rollout = SimpleNamespace(run=lambda method: made.append(method.__name__))
    channel = SimpleNamespace(
        agree=lambda: made.append("agree"),
        publish_again=lambda canary: made.append("publish"),
        is_published=is_published,
        is_sending=is_sending,
        keeps=keeps,
    )
    canary = torch.zeros(1, 4, dtype=torch.int64)
    restore_engines(*(cast(Any, rollout), cast(Any, channel), engine, canary, thread or threading.current_thread()))
    return made


def test_an_engine_gets_the_weights_that_were_published_last():
    assert calls("hf") == ["agree", "require_weights", "publish"]


def test_weights_are_not_published_twice_where_a_publication_or_the_router_follows():
    expected = ["agree", "require_weights"]
    assert calls("hf", is_sending=True) == calls("hf", is_published=False) == calls("vllm") == expected


def test_a_batch_that_is_drawn_ahead_gets_the_weights_that_it_began_with_or_none():
    assert calls("hf", keeps=True, thread=threading.Thread()) == ["agree", "require_weights", "publish"]
    with pytest.raises(RoleError, match=r"the weights that this batch or evaluation began with are gone; resume"):
        calls("hf", thread=threading.Thread())


@pytest.mark.parametrize(
    ("lead", "publish", "spare", "keeps"),
    [(0, "drain", 100, False), (1, "drain", 100, True), (1, "drain", 99, False), (1, "in_flight", 100, False)],
)
def test_weights_are_kept_for_batches_drawn_ahead_with_drain_where_the_store_has_room(
    lead: int, publish: Any, spare: int, keeps: bool, caplog: pytest.LogCaptureFixture
):
    channel = SimpleNamespace(keeps=False, bytes_by_node={"roomy": 400, "small": 100})
    spare_of = {"roomy": 500, "small": spare, "empty": 10**6}
    config = tiny_config(trainer=Trainer(lead=lead), rollout=Rollout(engine="vllm", publish=publish))
    keep_weights(cast(Any, channel), config, cast(Any, SimpleNamespace(spare=spare_of.__getitem__)))
    assert channel.keeps is keeps
    is_short = spare < 100
    assert (
        "the engines' weights (100 bytes on one node) exceed the part of its object store" in caplog.text
    ) is is_short
    assert ("raise placement.object_store_gb or lower placement.in_flight_gb" in caplog.text) is is_short
