"""Running ahead: weights reach engines, and the next batch is generated, while a batch is scored."""

import threading
import time
from pathlib import Path

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Checkpoint, Placement, Pool, Trainer
from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver import ahead
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, WithoutEngines
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from tests.unit.recipes.driver.sessions import SavingSession, session_of
from tests.unit.recipes.driver.test_ahead import PROMPTS, Engines, walk

WAIT_S = 30.0


class SlowScores:
    """Draws whose responses are complete at once, and whose scores come when a test allows it."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        steps: int,
        without_engines: bool = True,
        pool: str = "main",
        count: int = PROMPTS,
    ) -> None:
        trainer = Trainer(steps=steps, lead=1, prompts_per_step=PROMPTS)
        pools = {"main": Pool(), "engines": Pool()}
        placement = Placement(pools=pools, roles={"rollout": "engines", "reward": pool})
        self.session: SavingSession = session_of(folder, trainer=trainer, placement=placement)
        self.engines = Engines(self.session, draws_once=True)
        monkeypatch.setattr(ahead, "sync_weights", self.publish)
        self.without_engines, self.count = without_engines, count
        self.allowed = {number: threading.Event() for number in range(1, 9)}
        self.generated: list[int] = []

    def publish(self, session: Session, step: StepContext) -> None:
        self.engines.weights.version += 1

    def draw(self, session: Session, step: StepContext) -> Batch:
        rollouts = self.engines.draw(session, step).rollouts
        step.advance(prompts_consumed=step.progress.prompts_consumed - PROMPTS + self.count)
        self.generated.append(step.number)

        def score(context: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
            assert self.allowed[context.number].wait(WAIT_S), "the scores were never allowed"
            return rollouts.union({"valid": torch.tensor([True, True])})

        return Batch(rollouts, WithoutEngines(score) if self.without_engines else score)

    def wait_until_generated(self, number: int) -> None:
        end = time.monotonic() + WAIT_S
        while number not in self.generated:
            assert time.monotonic() < end, f"batch {number} was not generated"
            time.sleep(0.001)


def test_engines_get_weights_and_generate_the_next_batch_while_one_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scores = SlowScores(tmp_path, monkeypatch, steps=4)
    session, engines = scores.session, scores.engines
    queue = AheadQueue(session, scores.draw)
    scores.allowed[1].set()
    lags: list[torch.Tensor] = []

    def allow_late(number: int) -> None:
        """Allow the scores of a batch once the next one is generated."""
        scores.wait_until_generated(min(number + 1, 4))
        scores.allowed[number].set()

    for step in session.steps("train", 4):
        threading.Thread(target=allow_late, args=(step.number,), daemon=True).start()
        rollouts, _ = queue.take(step)
        lags.append(engines.weights.version - rollouts["policy_version"].values.unique())
        before = engines.weights.version
        queue.publish(step)
        assert engines.weights.version == before + 1
        assert [one.is_drawn for one in queue._waiting] == [False] * (step.number < 4)
    assert engines.drawn == [(1, 0), (2, 3), (3, 6), (4, 9)]
    assert torch.cat(lags).tolist() == [0, 1, 1, 1]


def test_engines_get_no_weights_before_a_score_that_may_need_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scores = SlowScores(tmp_path, monkeypatch, steps=2, without_engines=False)
    session, engines = scores.session, scores.engines
    queue = AheadQueue(session, scores.draw)
    scores.allowed[1].set()
    step = next(session.steps("train", 2))
    queue.take(step)
    scores.wait_until_generated(2)
    publishing = threading.Thread(target=queue.publish, args=(step,))
    publishing.start()
    publishing.join(0.2)
    assert engines.weights.version == 1
    scores.allowed[2].set()
    publishing.join(WAIT_S)
    assert engines.weights.version == 2


def test_a_batch_that_fails_while_it_is_scored_fails_its_step_and_every_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scores, failing = SlowScores(tmp_path, monkeypatch, steps=3), threading.Event()
    session, engines = scores.session, scores.engines

    def draw(session: Session, step: StepContext) -> Batch:
        batch = scores.draw(session, step)

        def fail(context: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
            assert failing.wait(WAIT_S)
            raise RoleError("reward", 0, "score", "it died")

        return Batch(batch.rollouts, WithoutEngines(fail)) if step.number == 2 else batch

    queue = AheadQueue(session, draw)
    scores.allowed[1].set()
    step = next(session.steps("train", 3))
    queue.take(step)
    queue.publish(step)
    queue.raise_failure()  # it has not failed yet
    assert engines.weights.version == 2
    failing.set()
    while not queue._waiting[0].is_drawn:
        time.sleep(0.001)
    with pytest.raises(RoleError, match="it died"):
        queue.raise_failure()
    with pytest.raises(RoleError, match="it died"):
        queue.save(tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()
    session.progress = step.progress
    with pytest.raises(RoleError, match="it died"):
        queue.take(session.begin_step(2))


@pytest.mark.parametrize("count", [PROMPTS - 1, PROMPTS + 1])
def test_with_drain_too_a_draw_that_takes_other_prompts_than_the_next_batch_expects_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    scores = SlowScores(tmp_path, monkeypatch, steps=3, count=count)
    for allowed in scores.allowed.values():
        allowed.set()
    with pytest.raises(ValueError, match=rf"step 1 took {count} prompts, .*prompts_per_step = {PROMPTS}; draw that"):
        walk(scores.session, AheadQueue(scores.session, scores.draw), scores.engines)


@pytest.mark.parametrize("shared", [False, True])
def test_engines_wait_for_scores_if_their_ranks_compute_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
):
    scores = SlowScores(tmp_path, monkeypatch, steps=3, pool="engines" if shared else "main")
    queue = AheadQueue(scores.session, scores.draw)
    scores.allowed[1].set()
    steps = scores.session.steps("train", 3)
    step = next(steps)
    queue.take(step)
    scores.wait_until_generated(2)
    publishing = threading.Thread(target=queue.publish, args=(step,))
    publishing.start()
    publishing.join(0.2 if shared else WAIT_S)
    # Ranks that load weights couldn't return scores, and one that fails as it scores would fail the publication.
    assert scores.engines.weights.version == (1 if shared else 2)
    if shared:
        scores.allowed[2].set()
        publishing.join(WAIT_S)
        assert scores.engines.weights.version == 2
        return
    step = scores.session.begin_step(2)
    taking = threading.Thread(target=queue.take, args=(step,))
    taking.start()
    scores.wait_until_generated(3)
    scores.allowed[2].set()
    taking.join(WAIT_S)


def test_a_step_that_is_saved_waits_for_the_scores_that_its_checkpoint_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scores = SlowScores(tmp_path, monkeypatch, steps=3)
    scores.session.config = scores.session.config.model_copy(update={"checkpoint": Checkpoint(every=1)})
    queue = AheadQueue(scores.session, scores.draw)
    scores.allowed[1].set()
    step = next(scores.session.steps("train", 3))
    queue.take(step)
    scores.wait_until_generated(2)
    threading.Timer(0.3, scores.allowed[2].set).start()
    queue.publish(step)
    assert queue._waiting[0].is_drawn
    assert step.timer.as_metrics()["time/drain_s"] > 0.1  # not in time/checkpoint_s
