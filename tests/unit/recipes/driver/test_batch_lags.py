"""Lags of a batch's tokens, computed from a few numbers per row: equal to those of a version per token."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import offload
from rlpack.batch.ragged import Ragged
from rlpack.batch.store import LocalStore
from rlpack.config.schema import Rollout, Trainer
from rlpack.recipes.driver import ahead, evaluation
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.batch_lags import report_lags, versions_of
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.late_groups import LateGroups
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.started_batch import StartedBatch
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.assemble import assemble
from rlpack.rollout.errors import StalenessError
from rlpack.rollout.types import Generations, TrajectoryBatch
from rlpack.rollout.version_counts import VERSION_COLUMNS
from tests.unit.recipes.driver.sessions import session_of

PROMPT = [5, 6]


class RemoteStore(LocalStore):
    """A store that offloads columns as that of a run does, and notes what the driver fetches."""

    def __init__(self) -> None:
        self.payloads: dict[Any, Any] = {}
        self.fetched: list[tuple[str, int]] = []  # column and rows
        self.numbers = itertools.count()

    def offload(self, batch: BatchedDataDict, *, permanent: bool = False) -> BatchedDataDict:
        offloaded, payloads = offload(batch)
        handles = [f"payload {next(self.numbers)}" for _ in payloads]
        self.payloads |= zip(handles, payloads, strict=True)
        return offloaded.with_handles(handles)

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        self.fetched += [(name, batch.num_rows) for name in batch]
        here = batch.copy()
        here.reader = lambda handles: [self.payloads[handle] for handle in handles]
        return BatchedDataDict(dict(here), row_ids=here.row_ids)


def rollouts_of(*versions: list[int], group: int = 1) -> BatchedDataDict:
    """Return rows, as a rollout rank does, whose tokens have these versions."""
    columns = Ragged.from_rows([torch.tensor(row, dtype=torch.int32) for row in versions], torch.int32)
    made = Generations(
        token_ids=columns.with_values(torch.ones_like(columns.values, dtype=torch.int64)),
        logprobs=columns.with_values(-torch.ones(columns.values.shape)),
        policy_versions=columns,
        finish_reasons=["stop"] * len(versions),
    )
    ids = torch.arange(len(versions)) // group
    prompts = Ragged.from_rows([PROMPT] * len(versions), torch.int64)
    return assemble(TrajectoryBatch.single_turn(prompts, made), group_ids=ids, uids=[str(i) for i in ids.tolist()])


def session_at(folder: Path, version: int, **trainer: Any) -> Session:
    trainer = {"steps": 3, "lead": 2} | trainer
    session = session_of(folder, trainer=Trainer(**trainer), rollout=Rollout(engine="vllm", publish="in_flight"))
    session.__dict__["rollout_weights"] = SimpleNamespace(version=version)
    session.store = RemoteStore()
    return session


def test_metrics_are_those_of_a_version_per_token_of_which_the_driver_reads_none(tmp_path: Path):
    rows = [[4, 4, 4], [], [3, 4, 5], [5], [3, 3, 3, 3], [4, 5, 5, 4]]
    lags = 5 - torch.tensor([version for row in rows for version in row])
    session, made = session_at(tmp_path, 5), rollouts_of(*rows)
    records = []
    for rollouts in (made, made.drop([VERSION_COLUMNS[0]])):
        step = session.begin_step(1)
        report_lags(session, step, versions_of(session, session.store.offload(rollouts)))
        records.append((step.lag, {name: step.metrics[name] for name in step.metrics if "lag" in name}))
    assert session.store.fetched == [("version_counts", 2), ("policy_version", len(rows))]
    assert records[0] == records[1]
    lag, metrics = records[0]
    assert (lag, metrics["rollout/lag"]) == (2, 2.0)
    assert metrics["rollout/lag_mean"] == pytest.approx(lags.double().mean().item(), abs=0)
    shares = [metrics[f"rollout/lag_share/{lag}"] for lag in range(3)]
    assert shares == [(lags == lag).double().mean().item() for lag in range(3)]


def test_a_batch_without_sampled_tokens_has_no_lag(tmp_path: Path):
    session = session_at(tmp_path, 5)
    step = session.begin_step(1)
    report_lags(session, step, versions_of(session, session.store.offload(rollouts_of([], []))))
    assert (step.lag, step.metrics["rollout/lag_mean"], step.metrics["rollout/lag_share/0"]) == (0, 0.0, 0.0)


@pytest.mark.parametrize("rows", [[[4], [2, 2]], [[4], [4, 2, 4]], [[5, 6], [4]], [[6], [4]]])
def test_one_token_that_is_too_old_or_from_the_future_is_an_error(tmp_path: Path, rows: list[list[int]]):
    session = session_at(tmp_path, 5)
    rollouts, every = session.store.offload(rollouts_of(*rows)), [version for row in rows for version in row]
    with pytest.raises(StalenessError, match=rf"versions {min(every)} to {max(every)}; .* from 3 to 5, the newest"):
        report_lags(session, session.begin_step(2), versions_of(session, rollouts))


@pytest.mark.parametrize("rows", [[[4], []], [[5, 4]], [[5], [6]]])
def test_an_evaluation_with_one_token_of_other_weights_is_an_error(tmp_path: Path, rows: list[list[int]]):
    session = session_at(tmp_path, 5)
    evaluation._check_versions(session, session.begin_step(2), session.store.offload(rollouts_of([5, 5], [], [5])))
    assert session.store.fetched == []
    with pytest.raises(StalenessError, match=r"the evaluation after step 2 has tokens of the policy versions"):
        evaluation._check_versions(session, session.begin_step(2), session.store.offload(rollouts_of(*rows)))


def queue_of(session: Session, monkeypatch: pytest.MonkeyPatch, answer: Any) -> AheadQueue:
    """Return a queue of batches of two groups of three rows, all of the newest version."""

    def draw(session: Session, step: StepContext) -> Batch:
        step.advance(prompts_consumed=step.progress.prompts_consumed + 2)
        made = rollouts_of(*[[session.rollout_weights.version] * 2] * 6, group=3)
        return Batch(session.store.offload(made.union({"answer": [answer] * 6})), as_scored)

    def publish(session: Session, step: StepContext) -> None:
        session.rollout_weights.version += 1

    monkeypatch.setattr(ahead, "sync_weights", publish)
    return AheadQueue(session, draw)


def test_with_drain_the_driver_fetches_the_lists_of_a_row_per_group_once_and_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    session = session_of(tmp_path, trainer=Trainer(steps=3, lead=1))
    session.__dict__["rollout_weights"], session.store = SimpleNamespace(version=1), RemoteStore()
    queue = queue_of(session, monkeypatch, "4")
    for step in session.steps("train", 3):
        queue.take(step)
        queue.publish(step)
    assert sorted(session.store.fetched) == [("answer", 2), ("finish_reason", 2), ("uid", 2)]


def test_a_prompts_column_that_a_checkpoint_can_not_hold_fails_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    session = session_of(tmp_path, trainer=Trainer(steps=3, lead=1))
    session.__dict__["rollout_weights"], session.store = SimpleNamespace(version=1), RemoteStore()
    queue = queue_of(session, monkeypatch, {1: "a"})
    with pytest.raises(Exception, match="column 'answer' has an entry of type dict that JSON would change"):
        queue.take(session.begin_step(1))


def test_late_groups_of_an_earlier_checkpoint_lack_counts_and_are_taken_with_others(tmp_path: Path):
    session = session_at(tmp_path, 3, late_groups={"window": 2, "share": 0.5}, prompts_per_step=2, group_size=1)
    groups = LateGroups(session.config.trainer)
    rewards = {"rewards": torch.ones(1), "valid": torch.ones(1, dtype=torch.bool)}
    late, own = (StartedBatch(session.begin_step(number), 0) for number in (1, 2))
    late.rollouts = session.store.offload(rollouts_of([2]).drop(VERSION_COLUMNS).union(rewards))
    groups.restore(late, {})
    own.rollouts = session.store.offload(rollouts_of([3, 3]).union(rewards))
    groups.restore(own, {})
    groups.batches.remove(own)
    taken = groups.take(own, session.begin_step(2), lambda: None)
    assert versions_of(session, taken) == {2: 1, 3: 2}
