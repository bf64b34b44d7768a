"""Running ahead in an object store that has no room for all batches: no wait is circular."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn
from rlpack.config.schema import Rollout, Trainer
from rlpack.distributed.errors import StoreFullError
from rlpack.distributed.object_handles import ObjectHandle
from rlpack.distributed.ray_store import RayStore
from rlpack.packing import Batching
from rlpack.recipes.driver import ahead
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from tests.unit.recipes.driver.sessions import AnsweringGroup, session_of

# Deadline of a wait for room: longer than a test may take.
LONG_S = 60.0


class Payloads:
    """Draws and steps that store payloads of a given size, which are never put anywhere."""

    def __init__(self, folder: Path, budget: int, *, lead: int = 1, steps: int = 4, **rollout: Any) -> None:
        trainer = Trainer(steps=steps, lead=lead, prompts_per_step=1)
        self.session = session_of(folder, trainer=trainer, rollout=Rollout(**rollout))
        self.session.__dict__["rollout_weights"] = self.weights = cast(Any, type("Weights", (), {"version": 1})())
        self.session.groups["rollout"] = cast(
            Any, AnsweringGroup("rollout", Batching(), {"interrupt": None, "resume": None})
        )
        self.store = RayStore(budget, wait_s=LONG_S, room=lambda: {"a": (1e9, 1e9)})
        self.session.store = cast(Any, self)
        self.before: dict[int, Callable[[], object]] = {}
        self.after: Callable[[int], object] = lambda number: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return versions, which are all new: nothing is stored in fact."""
        for column in batch.values():
            assert isinstance(column, RemoteColumn)
            assert all(handle.is_readable for handle in column.handles)
        return BatchedDataDict({"policy_version": Ragged.from_rows([[self.weights.version]], torch.int32)})

    def put(self, size: int) -> ObjectHandle:
        with self.store.reserve({"a": size}, "rollout", "generate") as room:
            return room.keep(cast(Any, "a reference"), size, "a", None, ("rollout", 0))

    def rows(self, size: int) -> BatchedDataDict:
        column = RemoteColumn.whole(self.put(size), "policy_version", Ragged.from_rows([[1]], torch.int32))
        return BatchedDataDict({"policy_version": column})

    def draw(self, session: Session, step: StepContext) -> Batch:
        self.before.get(step.number, lambda: None)()
        step.advance(prompts_consumed=step.progress.prompts_consumed + 1)
        rows = self.rows(60)
        self.after(step.number)
        return Batch(rows, as_scored)

    def publish(self, session: Session, step: StepContext) -> None:
        with session.publication():
            self.weights.version += 1

    def walk(self, *, of_step: int = 30, train: Callable[[StepContext], object] = lambda step: None) -> list[int]:
        """Run all steps, each of which stores payloads of its own; return their numbers."""
        queue, done = AheadQueue(self.session, self.draw), list[int]()
        for step in self.session.steps("train", self.session.config.trainer.steps):
            batch = queue.take(step)
            own = self.put(of_step)
            train(step)
            assert own.is_readable
            assert batch.rollouts.num_rows == 1
            queue.publish(step)
            done.append(step.number)
        return done


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Payloads]:
    def make(*args: Any, **named: Any) -> Payloads:
        made = Payloads(*args, **named)
        monkeypatch.setattr(ahead, "sync_weights", made.publish)
        return made

    return make


def within(seconds: float, function: Callable[[], Any]) -> Any:
    began = time.monotonic()
    try:
        return function()
    finally:
        assert time.monotonic() - began < seconds


@pytest.mark.parametrize("mode", [{}, {"publish": "in_flight", "engine": "vllm"}])
def test_a_draw_waits_for_the_room_of_the_step_in_progress_which_gives_it_before_it_waits_itself(
    tmp_path: Path, payloads: Callable[..., Payloads], mode: dict[str, Any]
):
    run = payloads(tmp_path, 100, **mode)
    drawn: list[int] = []

    def wait_for_the_one_before(number: int) -> None:
        while mode and len(drawn) < number - 1:
            time.sleep(0.01)

    run.before = {number: partial(wait_for_the_one_before, number) for number in range(1, 5)}
    run.after = drawn.append
    assert within(30, run.walk) == [1, 2, 3, 4]
    assert run.store.in_flight <= 60


def test_a_batch_that_exceeds_the_store_with_those_drawn_after_it_is_one_error_at_once(
    tmp_path: Path, payloads: Callable[..., Payloads]
):
    run = payloads(tmp_path, 170, lead=2, publish="in_flight", engine="vllm")
    drawn = [threading.Event(), threading.Event()]
    # Batches 2 and 3 are drawn before batch 1, which waits for room that only later steps would give.
    run.before = {1: lambda: [one.wait(LONG_S) for one in drawn] and time.sleep(0.3)}
    run.before |= {2: drawn[0].set, 3: drawn[1].set}
    with pytest.raises(StoreFullError, match=r"60 bytes .* exceed .* by 10 bytes: 120 bytes of the 170 bytes") as full:
        within(20, run.walk)
    assert "or trainer.lead (batches drawn ahead take room, too), or raise placement.object_store_gb" in str(full.value)
    assert (full.value.step, full.value.phase) == (1, "train")


def test_a_batch_too_large_to_fit_next_to_none_fails_though_the_step_waits_for_it(
    tmp_path: Path, payloads: Callable[..., Payloads]
):
    run = payloads(tmp_path, 100)
    run.before = {2: lambda: setattr(run, "kept", run.store.lease("the run").run(lambda: run.put(10)))}
    run.before |= {3: lambda: setattr(run, "more", run.put(50))}
    with pytest.raises(StoreFullError, match="60 bytes of tokens and texts exceed"):
        within(20, run.walk)
    assert run.session.progress.step == 2
