"""A session's own work, over a run and roles that only note what is asked of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import offload
from rlpack.batch.remote import RemoteColumn
from rlpack.batch.store import LocalStore
from rlpack.config.schema import Algorithm, Checkpoint, Config, Data, SFTWarmup, Trainer
from rlpack.distributed.calls import Pending
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching, make_plan
from rlpack.recipes import sft
from rlpack.recipes.driver import stages
from rlpack.recipes.driver.evaluation import evaluate_loss
from rlpack.recipes.driver.resume import reference_folder
from rlpack.recipes.driver.session import Progress, Session
from rlpack.recipes.driver.splits import in_store, load_splits
from rlpack.worker import Trainable
from rlpack.workers.actor import ActorWorker
from rlpack.workers.reference import ReferenceWorker
from tests.builders import tiny_config, tiny_rollouts

DATA = Data(generator={"train_size": 16, "validation_size": 4}, completion_column="demonstration")


class FakeRun:
    """Notes what is logged; `interrupt_at` is the log call in which somebody presses Ctrl-C."""

    def __init__(self, directory: Path, interrupt_at: int | None = None) -> None:
        self.directory = directory
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

    def keep_plan(self, plan: Any) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)


class FakeGroup:
    """A role on one rank whose methods return what `answers` has for their names."""

    def __init__(self, role: str, batching: Batching, answers: dict[str, Any]) -> None:
        self.role, self.batching, self.answers, self.num_ranks = role, batching, answers, 1
        self.called: list[str] = []
        self.trained = False

    def implements(self, interface: type) -> bool:
        return interface is Trainable and self.trained

    def plan(self, batch: BatchedDataDict, *, mini_batches: bool = False) -> Any:
        return make_plan(batch["input_ids"].lengths.numpy(), self.batching, dp_size=1)

    def with_plan(self, plan: Any) -> Self:
        return self

    def submit(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return Pending(partial(self.run, method, *args, **kwargs))

    def run(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.called.append(method.__name__)
        answer = self.answers[method.__name__]
        return answer(*args, **kwargs) if callable(answer) else answer


class SavingSession(Session):
    saved: tuple[int, ...] = ()

    def save(self) -> None:
        self.saved = (*self.saved, self.progress.step)


def session_of(folder: Path, interrupt_at: int | None = None, **sections: Any) -> SavingSession:
    config: Config = tiny_config(**({"data": DATA, "checkpoint": Checkpoint(every=100)} | sections))
    tokenizer, prompts, held_out = load_splits(config)
    splits = in_store(LocalStore(), tokenizer, prompts, held_out)
    return SavingSession(config, cast(Any, FakeRun(folder, interrupt_at)), tokenizer, *splits, {})


def set_group(session: Session, name: str, batching: Batching | None = None, **answers: Any) -> FakeGroup:
    group = FakeGroup(name, batching or Batching(), answers)
    session.groups[name] = cast(WorkerGroup[Any], group)
    return group


def run_of(session: Session) -> FakeRun:
    return cast(FakeRun, session.run)


def walk(session: Session, total: int) -> None:
    for _ in session.steps("train", total, lambda _: None):
        pass


@pytest.mark.parametrize(
    ("interrupt_at", "logged", "saved"),
    [
        (0, [], ()),
        (1, [("evaluation", 0)], ()),
        (2, [("evaluation", 0), ("train", 1)], (1,)),
        (4, [("evaluation", 0), ("train", 1), ("train", 2), ("evaluation", 2)], (2,)),
    ],
)
def test_ctrl_c_ends_a_run_at_once_and_saves_finished_steps(
    tmp_path: Path, interrupt_at: int, logged: list[tuple[str, int]], saved: tuple[int, ...]
):
    session = session_of(tmp_path, interrupt_at)
    with pytest.raises(KeyboardInterrupt):
        walk(session, 2)
    assert (run_of(session).logged, session.saved) == (logged, saved)


def test_a_recipe_that_reports_no_plan_runs_and_every_step_is_known(tmp_path: Path):
    session = session_of(tmp_path)
    assert session.step is None
    assert list(session.steps("train", 3)) == [1, 2, 3]
    assert (session.step, session.saved) == (3, (3,))


def test_skipped_steps_make_no_new_version_of_the_policy(tmp_path: Path):
    session = session_of(tmp_path)
    session.took_steps([{"actor/skipped_steps": 0.0}, {"actor/skipped_steps": 1.0}, {"actor/skipped_steps": 0.0}])
    assert session.progress.policy_version == 2
    assert session.metrics == {"policy_version": 2, "sft_warmup/skipped_steps": 1.0}


def test_prompts_go_on_where_they_were_left_with_another_number_a_step(tmp_path: Path):
    whole, parts = (session_of(tmp_path, trainer=Trainer(prompts_per_step=count)) for count in (6, 2))
    expected = stages.draw_prompts(whole, 1)
    drawn = [stages.draw_prompts(parts, 1)]
    resumed = session_of(tmp_path, trainer=Trainer(prompts_per_step=4))
    resumed.progress = Progress(phase="train", step=1, prompts_seen=parts.progress.prompts_seen)
    drawn.append(stages.draw_prompts(resumed, 2))
    assert [uid for draw in drawn for uid in draw.prompts["uid"]] == expected.prompts["uid"]
    assert np.concatenate([draw.positions for draw in drawn]).tolist() == expected.positions.tolist()
    assert resumed.metrics["prompts_seen"] == 6


def test_demonstrations_go_on_where_they_were_left(tmp_path: Path):
    session = session_of(tmp_path)
    set_group(session, "actor")
    whole = stages.demonstrations(session, 6)
    other = session_of(tmp_path)
    set_group(other, "actor")
    parts = [stages.demonstrations(other, count) for count in (2, 4)]
    assert torch.equal(torch.cat([part["input_ids"].values for part in parts]), whole["input_ids"].values)
    assert other.progress.demonstrations_seen == 6


def test_a_reference_of_a_run_that_came_to_nothing_is_not_taken_over(tmp_path: Path):
    def freeze(progress: Progress) -> str:
        session = session_of(tmp_path)
        session.progress = progress
        set_group(session, "actor", export_model=lambda folder: (Path(folder).mkdir(), Path(folder, "own").touch()))
        reference = set_group(session, "reference", load_model=lambda folder: None)
        stages.freeze_reference(session)
        assert reference.called == [ReferenceWorker.load_model.__name__]
        return "own" if (reference_folder(tmp_path) / "own").exists() else "other"

    reference_folder(tmp_path).mkdir(parents=True)
    assert freeze(Progress(phase="train", step=1)) == "other"
    assert freeze(Progress(phase="sft_warmup", step=4)) == "own"
    assert freeze(Progress(phase="train", step=1)) == "own"


def test_the_gap_to_the_sampler_is_a_mean_over_tokens(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2)])

    def logprobs(batch: BatchedDataDict) -> BatchedDataDict:
        sums = {"logprob_sum": torch.zeros(3).double(), "logprob_gap": torch.tensor([2.0, 2.5, 1.0]).double()}
        figures = {"response_tokens": torch.tensor([4, 5, 2]), **sums}
        return batch.keep([]).union({"logprobs": batch["rollout_logprobs"], **figures})

    set_group(session, "actor", logprobs=logprobs)
    assert "response_tokens" in stages.old_logprobs(session, rollouts)
    assert session.metrics["rollout/logprob_gap"] == pytest.approx(0.5)


def test_advantages_are_reported_of_the_rows_that_train(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4)] * 4, group=4)
    set_group(session, "actor")
    valid, rewards = torch.tensor([True, True, False, False]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    given = {"rewards": rewards, "valid": valid, "response_tokens": torch.full((4,), 4)}
    stages.advantages(session, rollouts.union(given))
    assert session.metrics["advantage/std"] == pytest.approx(0.5**0.5, rel=1e-3)


class AwayStore(LocalStore):
    """Notes the columns that are taken, once each."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.taken: list[str] = []

    def offload(self, batch: BatchedDataDict, *, permanent: bool = False) -> BatchedDataDict:
        found, self.parts = offload(batch)
        return found.with_handles(range(len(self.parts)))

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        here = batch.copy()
        here.reader = lambda parts: [self.parts[int(str(part))] for part in parts]
        self.taken += [name for name in batch if isinstance(batch[name], RemoteColumn)]
        return BatchedDataDict(dict(here), row_ids=here.row_ids)


def against_scores(rewards: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return advantages from a column of several numbers a row."""
    return rewards - scores.sum(1)


def test_an_advantage_function_gets_several_numbers_a_row_where_it_names_them(tmp_path: Path):
    algorithm = Algorithm(advantage=f"{__name__}:against_scores")
    session, rollouts = session_of(tmp_path, algorithm=algorithm), tiny_rollouts([(2, 4)] * 2, group=2)
    set_group(session, "actor")
    store = session.store = AwayStore()
    rows = {"rewards": torch.tensor([0.0, 1.0]), "valid": torch.ones(2, dtype=torch.bool)}
    away = store.offload(
        BatchedDataDict({"scores": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "unasked": torch.ones(2, 9)})
    )
    found = stages.advantages(session, rollouts.union({**rows, **away, "response_tokens": torch.full((2,), 4)}))
    assert found["advantages"].tolist() == [-3.0, -6.0]
    assert store.taken == ["scores"]


def test_quarantined_rows_weigh_nothing_and_the_others_as_if_they_were_not_there(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (2, 6), (2, 8), (2, 3)], group=4)
    set_group(session, "actor")
    counts = torch.tensor([4, 6, 8, 3])
    given = {"rewards": torch.tensor([0.0, 1.0, 0.0, 1.0]), "valid": torch.tensor([True, True, False, True])}
    weighed = stages.advantages(session, rollouts.union({**given, "response_tokens": counts}))
    for name in ("loss_weight", "token_weight"):
        assert weighed[name][2] == 0
        assert (weighed[name] * counts).sum().item() == pytest.approx(1.0)
        assert weighed[name][0] == pytest.approx(1 / 13)
    assert weighed["advantages"][2] == 0


def test_supervised_runs_report_the_loss_of_held_out_demonstrations(tmp_path: Path):
    session = session_of(tmp_path)

    def logprobs(batch: BatchedDataDict, *, temperature: float) -> BatchedDataDict:
        assert temperature == 1.0
        counts = torch.tensor([int(row.sum()) for row in batch["response_mask"].rows()])
        return batch.keep([]).union({"response_tokens": counts, "logprob_sum": counts.double() * -0.25})

    actor = set_group(session, "actor", logprobs=logprobs)
    evaluate_loss(session)
    assert actor.called == [ActorWorker.logprobs.__name__]
    assert session.metrics == pytest.approx({"evaluation/loss": 0.25, "evaluation/perplexity": 1.2840254})


def test_a_checkpoint_holds_all_roles_that_are_trained_and_no_others(tmp_path: Path):
    session = session_of(tmp_path)
    for name, trained in (("actor", True), ("rollout", False), ("judge_in_training", True)):
        set_group(session, name, save=lambda folder: Path(folder).mkdir()).trained = trained
    Session.save(session)
    (folder,) = (tmp_path / "checkpoints").glob("*/step-0")
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"actor", "judge_in_training"}


def test_a_warm_up_takes_its_steps_and_starts_the_optimizer_anew_at_its_end(tmp_path: Path):
    session = session_of(tmp_path, sft_warmup=SFTWarmup(steps=2, batch_size=3))
    answers = {"train_step": [{"actor/skipped_steps": 0.0}], "reset_optimizer": None}
    actor = set_group(session, "actor", **answers)
    sft.sft_warmup(session)
    assert actor.called == ["train_step", "train_step", "reset_optimizer"]
    assert (session.saved, session.progress.demonstrations_seen) == ((2,), 6)
