"""Sessions over a run and roles that record their calls, for the tests of the driver."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.store import LocalStore
from rlpack.config.schema import Checkpoint, Config, Data
from rlpack.distributed.calls import Call, Pending
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.usage import Usage
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching, make_plan
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.splits import cache_splits, load_splits
from tests.builders import tiny_config

DATA = Data(generator={"train_size": 16, "validation_size": 4}, completion_column="demonstration")


class RecordingRun:
    """Records what is logged; `interrupt_at` is the log call during which Ctrl-C is pressed."""

    def __init__(self, directory: Path, interrupt_at: int | None = None) -> None:
        self.run_dir = directory
        self.logged: list[tuple[str, int]] = []
        self.records: list[dict[str, float]] = []
        self.notes: list[str] = []
        self.interrupted = interrupt_at == 0
        self._interrupt_at = interrupt_at

    def log(self, step: int, metrics: dict[str, float], phase: str) -> None:
        self.logged.append((phase, step))
        self.records.append(dict(metrics))
        self.interrupted |= len(self.logged) == self._interrupt_at

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def progress(self, total: float, description: str) -> Iterator[Any]:
        yield self

    def advance(self) -> None: ...

    def record_plan(self, plan: Any, responses: Any) -> None: ...

    def log_samples(self, samples: Any) -> None: ...

    def check_lock(self) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)


class UnmeasuredRanks:
    """The rank of a role whose calls take no time."""

    num_ranks = num_starts = 1
    nodes = ("a",)

    def after_restart(self, key: Any, function: Callable[[], None]) -> None: ...

    def pop_usage(self, role: str) -> dict[str, Usage]:
        return {}

    def apply(self, function: Callable[..., Any], *args: Any) -> Pending[list[Any]]:
        return Pending(lambda: [1.0])


class AnsweringRanks(UnmeasuredRanks):
    """The rank of an `AnsweringGroup`."""

    def __init__(self, group: "AnsweringGroup") -> None:
        self.group = group

    def submit(self, call: Call) -> Pending[list[Any]]:
        return Pending(lambda: [self.group.answer(call.method, *call.args_of_rank[0], **call.kwargs)])


class AnsweringGroup:
    """A role on one rank whose methods return what `answers` has for their names."""

    def __init__(self, role: str, batching: Batching, answers: dict[str, Any]) -> None:
        self.role, self.batching, self.answers, self.dp_size, self.num_ranks = role, batching, answers, 1, 1
        self.layout, self.ranks = ParallelLayout(), AnsweringRanks(self)
        self.called: list[str] = []
        self.mini_batch_size: int | None = None
        self.submitted: list[str] = []

    def plan(self, batch: BatchedDataDict, *, mini_batches: bool = False) -> Any:
        mini_batch_size = self.mini_batch_size if mini_batches else None
        lengths = batch["input_ids"].lengths.numpy()
        return make_plan(lengths, self.batching, dp_size=1, mini_batch_size=mini_batch_size)

    def with_plan(self, plan: Any) -> Self:
        return self

    def discard_submitted(self) -> list[str]:
        discarded, self.submitted = self.submitted, []
        return discarded

    def submit(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return Pending(partial(self.run, method, *args, **kwargs))

    def run_at_every_start(self, method: Any, *args: Any) -> Any:
        return self.run(method, *args)

    def run(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self.answer(method.__name__, *args, **kwargs)

    def answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.called.append(name)
        answer = self.answers[name]
        return answer(*args, **kwargs) if callable(answer) else answer


class SavingSession(Session):
    saved: tuple[int, ...] = ()
    before_save: Callable[[], None] = staticmethod(lambda: None)

    def save(self, *, in_background: bool = False) -> None:
        self.before_save()
        self.saved = (*self.saved, self.progress.step)


def session_of(folder: Path, interrupt_at: int | None = None, **sections: Any) -> SavingSession:
    config: Config = tiny_config(**({"data": DATA, "checkpoint": Checkpoint(every=100)} | sections))
    tokenizer, prompts, held_out = load_splits(config)
    splits = cache_splits(LocalStore(), tokenizer, prompts, held_out)
    return SavingSession(config, cast(Any, RecordingRun(folder, interrupt_at)), tokenizer, *splits, {})


def set_group(session: Session, name: str, batching: Batching | None = None, **answers: Any) -> AnsweringGroup:
    group = AnsweringGroup(name, batching or Batching(), answers)
    session.groups[name] = cast(WorkerGroup[Any], group)
    return group


def run_of(session: Session) -> RecordingRun:
    return cast(RecordingRun, session.run)
