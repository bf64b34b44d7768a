"""Running ahead in an object store that has no room for all batches: no wait is circular."""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn
from rlpack.config.schema import Evaluation, Rollout, Trainer
from rlpack.config.sections.held_out import EvaluationSet
from rlpack.distributed.errors import StoreFullError
from rlpack.distributed.object_handles import ObjectHandle
from rlpack.distributed.ray_store import RayStore
from rlpack.packing import Batching
from rlpack.recipes.driver import ahead
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.batch_room import BatchRoom
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.evaluations import EnginesOnly
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.started_batch import StartedBatch
from rlpack.recipes.driver.step_context import StepContext
from tests.unit.recipes.driver.sessions import DATA, AnsweringGroup, session_of

# Deadline of a wait for room: longer than a test may take.
LONG_S = 60.0
IN_FLIGHT = {"publish": "in_flight", "engine": "vllm"}
# Tokens of a row, which is as long as a row can be.
MOST_TOKENS = 100


class Payloads:
    """Draws and steps that store payloads of a given size, which are never put anywhere."""

    def __init__(
        self,
        folder: Path,
        budget: int,
        *,
        lead: int = 1,
        steps: int = 4,
        trainer: Mapping[str, Any] | None = None,
        **rollout: Any,
    ) -> None:
        sizes = {"prompts_per_step": 1, "group_size": 1} | dict(trainer or {})
        data = DATA.model_copy(update={"max_prompt_tokens": MOST_TOKENS - 5})
        self.session = session_of(
            *(folder,),
            trainer=Trainer(steps=steps, lead=lead, **sizes),
            data=data,
            rollout=Rollout(max_new_tokens=5, **rollout),
            evaluation=Evaluation(every=steps),
        )
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
        return BatchedDataDict(
            {"policy_version": Ragged.from_rows([[self.weights.version] * MOST_TOKENS], torch.int32)}
        )

    def put(self, size: int) -> ObjectHandle:
        with self.store.reserve({"a": size}, "rollout", "generate") as room:
            return room.keep(cast(Any, "a reference"), size, "a", None, ("rollout", 0))

    def rows(self, size: int) -> BatchedDataDict:
        column = RemoteColumn.whole(
            self.put(size), "policy_version", Ragged.from_rows([[1] * MOST_TOKENS], torch.int32)
        )
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

    def walk(
        self, *, of_step: int = 30, before_train: Callable[[AheadQueue], object] = lambda queue: None
    ) -> list[int]:
        """Run all steps, each of which stores payloads of its own; return their numbers."""
        queue, done = AheadQueue(self.session, self.draw), list[int]()
        for step in self.session.steps("train", self.session.config.trainer.steps):
            batch = queue.take(step)
            before_train(queue)
            own = self.put(of_step)
            assert own.is_readable
            assert batch.rollouts.num_rows == 1
            queue.publish(step)
            done.append(step.number)
        return done


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Payloads]:
    def make(*args: Any, of: Callable[..., Payloads] = Payloads, **named: Any) -> Payloads:
        made = of(*args, **named)
        monkeypatch.setattr(ahead, "sync_weights", made.publish)
        return made

    return make


def within(seconds: float, function: Callable[[], Any]) -> Any:
    began = time.monotonic()
    try:
        return function()
    finally:
        assert time.monotonic() - began < seconds


@pytest.mark.parametrize("mode", [{}, IN_FLIGHT])
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


@pytest.mark.parametrize("budget", [100, 170, 240])
def test_no_later_batch_takes_the_room_of_an_earlier_one(
    tmp_path: Path, payloads: Callable[..., Payloads], budget: int, caplog: pytest.LogCaptureFixture
):
    run = payloads(tmp_path, budget, lead=2, steps=6, publish="in_flight", engine="vllm")
    drawn = [threading.Event() for _ in range(8)]
    run.after = lambda number: drawn[number].set()
    # Every batch would be drawn after the two that follow it, if these were drawn at the same time.
    run.before = {number: partial(wait_for_next, drawn, number) for number in range(1, 7)}
    assert within(30, run.walk) == [1, 2, 3, 4, 5, 6]
    held_back = [record.getMessage() for record in caplog.records if "is not drawn yet" in record.getMessage()]
    assert len(held_back) == 1
    assert f"room for {budget} bytes. It is drawn once earlier batches are trained on" in held_back[0]
    assert "Raise placement.in_flight_gb or placement.object_store_gb" in held_back[0]


def wait_for_next(drawn: list[threading.Event], number: int) -> None:
    """Wait a moment for the two batches that follow one."""
    for event in drawn[number + 1 : number + 3]:
        event.wait(0.2)


def test_where_there_is_room_for_all_batches_later_ones_may_be_drawn_first(
    tmp_path: Path, payloads: Callable[..., Payloads], caplog: pytest.LogCaptureFixture
):
    run = payloads(tmp_path, 10**6, lead=2, steps=3, publish="in_flight", engine="vllm")
    drawn = [threading.Event() for _ in range(4)]
    run.after = lambda number: drawn[number].set()
    run.before = {1: lambda: drawn[3].wait(LONG_S), 3: lambda: drawn[2].wait(LONG_S)}
    assert within(30, run.walk) == [1, 2, 3]
    assert not caplog.records


@pytest.mark.parametrize("mode", [{}, IN_FLIGHT])
def test_no_batch_takes_the_room_that_the_step_in_progress_needs(
    tmp_path: Path, payloads: Callable[..., Payloads], mode: dict[str, Any]
):
    run = payloads(tmp_path, 120, **mode)
    drawn = [threading.Event() for _ in range(6)]
    run.after = lambda number: drawn[number].set()
    steps = iter(range(2, 6))

    def train_while_the_next_is_drawn(queue: AheadQueue) -> None:
        drawn[next(steps)].wait(0.3)

    assert within(30, partial(run.walk, before_train=train_while_the_next_is_drawn)) == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", [{}, IN_FLIGHT])
@pytest.mark.parametrize("budget", [160, 215, 340])
def test_the_first_step_may_store_more_than_its_batch(
    tmp_path: Path, payloads: Callable[..., Payloads], mode: dict[str, Any], budget: int
):
    run = payloads(tmp_path, budget, **mode)
    drawn = [threading.Event() for _ in range(6)]
    run.after = lambda number: drawn[number].set()
    steps = iter(range(2, 6))
    train = partial(run.walk, of_step=100, before_train=lambda queue: drawn[next(steps)].wait(0.2))
    assert within(30, train) == [1, 2, 3, 4]


def test_an_evaluation_during_a_step_has_room_next_to_the_batches(tmp_path: Path, payloads: Callable[..., Payloads]):
    run = payloads(tmp_path, 240, lead=2, publish="in_flight", engine="vllm")
    room = BatchRoom(run.session)
    started = StartedBatch(StepContext(1, run.session.progress, lease=run.store.lease("batch 1")), 0)
    with run.store.lease("step 0") as lease:
        run.put(60)
        room.record_batch(lease, MOST_TOKENS)
        room.record_step(lease, MOST_TOKENS)
    # Each takes at most 60 bytes and a quarter more: the batch that was started, the next one, and a step.
    assert room.holds_one_more(2, [started])
    run.session.__dict__["config"] = run.session.config.model_copy(update={"evaluation": Evaluation(every=2)})
    assert not room.holds_one_more(2, [started])


@pytest.mark.parametrize(
    ("mode", "budget"),
    [({}, 140), ({}, 120), (IN_FLIGHT, 140), (IN_FLIGHT, 100), (IN_FLIGHT | {"lead": 2}, 100)],
    ids=str,
)
def test_an_evaluation_neither_takes_room_of_the_next_step_nor_waits_for_it(
    tmp_path: Path, payloads: Callable[..., Payloads], mode: dict[str, Any], budget: int
):
    run = payloads(tmp_path, budget, **mode)
    evaluation = Evaluation(every=1, samples=1)
    run.session.__dict__["config"] = run.session.config.model_copy(update={"evaluation": evaluation})
    evaluated: list[int] = []

    @EnginesOnly
    def evaluate(session: Session, step: StepContext) -> None:
        with run.store.lease("an evaluation"):
            kept = []
            for _ in range(3):
                kept.append(run.put(20))
                time.sleep(0.1)
        evaluated.append(step.number)

    queue = AheadQueue(run.session, run.draw)
    for step in run.session.steps("train", 4, evaluate):
        queue.take(step)
        own = []
        for _ in range(2):
            own.append(run.put(15))
            time.sleep(0.1)
        queue.publish(step)
    assert run.session.progress.step == 4
    assert evaluated == [0, 1, 2, 3, 4]


def test_a_draw_of_several_rounds_may_take_the_room_of_each(tmp_path: Path, payloads: Callable[..., Payloads]):
    run = payloads(tmp_path, 400, lead=1)
    drawn = StartedBatch(
        StepContext(1, run.session.progress, lease=run.store.lease("batch 1")), 0, rollouts=run.rows(0)
    )
    rooms = [BatchRoom(run.session, rounds) for rounds in (1, 3, 4)]
    with drawn.context.lease as lease:
        kept = run.put(60)
        for room in rooms:
            room.record_batch(lease, MOST_TOKENS)
            room.record_step(lease, MOST_TOKENS)
        # The batch that was drawn holds 60 bytes; a round of the next one takes at most 75, and so does a step.
        assert [room.holds_one_more(2, [drawn]) for room in rooms] == [True, True, False]
        assert kept.is_readable


def test_sets_that_are_evaluated_at_the_end_need_no_room_during_steps(
    tmp_path: Path, payloads: Callable[..., Payloads], monkeypatch: pytest.MonkeyPatch
):
    run = payloads(tmp_path, 100, lead=2, publish="in_flight", engine="vllm")
    evaluation = Evaluation(every=1, samples=1, sets={"test": EvaluationSet(source="t.jsonl", at_end=True)})
    run.session.__dict__["config"] = run.session.config.model_copy(update={"evaluation": evaluation})
    run.session.evaluation_sets["test"] = cast(Any, range(10**6))
    room, held_out = BatchRoom(run.session), len(run.session.held_out)
    with run.store.lease("a batch") as lease:
        run.put(1)
        room.record_batch(lease, MOST_TOKENS)
    started = StartedBatch(StepContext(1, run.session.progress, lease=run.store.lease("batch 1")), 0)
    # Each row takes at most 1.25 bytes: those of two batches and a step, and the prompts that are held out.
    assert 1.25 * (3 + held_out) <= 100
    assert room.holds_one_more(2, [started])


class LateGroups(Payloads):
    """Draws of four groups, each of which stores 15 bytes; the last group of every third batch takes longer."""

    def __init__(self, folder: Path, budget: int) -> None:
        window = {"prompts_per_step": 4, "late_groups": {"window": 3, "share": 0.25}}
        super().__init__(folder, budget, lead=1, steps=12, trainer=window, **IN_FLIGHT)
        self.trained_on: list[str] = []
        self.most_left = self.peak = 0.0

    def draw_groups(self, session: Session, step: StepContext, on_groups: Callable[[Batch], None]) -> None:
        step.advance(prompts_consumed=step.progress.prompts_consumed + 4)
        for group in (3, 1, 0, 2):
            time.sleep(0.2 if group == 2 and step.number % 3 == 1 else 0.0)
            row = {
                **self.rows(15),
                "uid": [f"{step.number}.{group}"],
                "group_ids": torch.tensor([group]),
                "response_lengths": torch.tensor([1]),
                "finish_reason": ["stop"],
                "rewards": torch.ones(1),
                "valid": torch.tensor([True]),
            }
            on_groups(Batch(BatchedDataDict(row, row_ids=[group]), as_scored))

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        versions = Ragged.from_rows([[self.weights.version]] * batch.num_rows, torch.int32)
        return BatchedDataDict({"policy_version": versions})

    def walk_late(self) -> None:
        queue = AheadQueue(self.session, self.draw, self.draw_groups)
        for step in self.session.steps("train", 12):
            rows = queue.take(step).rollouts
            self.trained_on += list(rows["uid"])
            own = self.put(60)  # the step's payloads, next to those of the batches
            self.peak = max(self.peak, self.store.in_flight)
            assert own.is_readable
            queue.publish(step)
            self.most_left = max(self.most_left, step.metrics["rollout/groups_left"])


@pytest.mark.parametrize("budget", [130, 160, 210, 260, 340, 420, 10**6])
def test_groups_are_late_only_if_the_store_holds_their_batches_too(
    tmp_path: Path, payloads: Callable[..., Payloads], budget: int, caplog: pytest.LogCaptureFixture
):
    run = cast(LateGroups, payloads(tmp_path, budget, of=LateGroups))
    within(40, run.walk_late)
    assert sorted(run.trained_on) == sorted(f"{step}.{group}" for step in range(1, 13) for group in range(4))
    assert run.peak <= budget
    warnings = [record.getMessage() for record in caplog.records if "waits for all groups" in record.getMessage()]
    if budget <= 210:
        assert run.most_left == 0
        assert len(warnings) == 1
        assert "Raise placement.in_flight_gb" in warnings[0]
    elif budget == 10**6:
        assert run.most_left > 0
        assert not warnings


def test_a_batch_too_large_to_fit_next_to_none_fails_though_the_step_waits_for_it(
    tmp_path: Path, payloads: Callable[..., Payloads]
):
    run = payloads(tmp_path, 100)
    run.before = {2: lambda: setattr(run, "kept", run.store.lease("the run").run(lambda: run.put(10)))}
    run.before |= {3: lambda: setattr(run, "more", run.put(50))}
    with pytest.raises(StoreFullError, match="60 bytes of tokens and texts exceed"):
        within(20, run.walk)
    assert run.session.progress.step == 2
