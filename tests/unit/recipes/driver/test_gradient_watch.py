"""Gradients that stay NaN or infinite end a run; single ones are a warning."""

import math
from pathlib import Path
from typing import cast

import pytest

from rlpack.batch.store import LocalLease
from rlpack.config.schema import Trainer
from rlpack.recipes.driver.gradient_watch import MOST_LOST, GradientWatch, NonFiniteGradientError, NothingTrainedError
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.step_context import StepContext
from tests.unit.recipes.driver.sessions import RecordingRun, session_of


def step_with(number: int, *norms: float, role: str = "actor") -> StepContext:
    """Return a step that took an optimizer step of a role for each gradient norm."""
    step = StepContext(number, Progress("train"), lease=LocalLease())
    updates = [{f"{role}/grad_norm": norm, f"{role}/skipped_steps": float(not math.isfinite(norm))} for norm in norms]
    step.record_optimizer_steps(updates)
    return step


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_role_whose_gradients_stay_non_finite_ends_the_run(norm: float, caplog: pytest.LogCaptureFixture):
    watch = GradientWatch()
    for number in range(1, MOST_LOST):
        watch.check(step_with(number, norm, norm, role="critic"))
        watch.check(step_with(number, 1.0))
    assert len(caplog.records) == 1
    assert "step 1: the gradient of the critic was NaN or infinite in 2 of 2 optimizer steps" in caplog.text
    with pytest.raises(NonFiniteGradientError, match=f"step {MOST_LOST} of train: the gradient of the critic has been"):
        watch.check(step_with(MOST_LOST, norm, norm, role="critic"))


def test_steps_that_take_some_updates_never_end_it(caplog: pytest.LogCaptureFixture):
    watch = GradientWatch()
    for number in range(1, 4 * MOST_LOST):
        norms = (math.nan, 0.5) if number % MOST_LOST == 0 else (math.nan, math.nan)
        watch.check(step_with(number, *norms))
    assert len(caplog.records) == 1


def test_optimizer_steps_without_tokens_dont_hide_lost_ones():
    watch = GradientWatch()

    def take(number: int) -> None:
        step = StepContext(number, Progress("train"), lease=LocalLease())
        updates = [{"actor/grad_norm": norm, "actor/skipped_steps": 1.0} for norm in (math.nan, 0.0)]
        step.record_optimizer_steps(updates, [True, False])
        watch.check(step)

    for number in range(1, MOST_LOST):
        take(number)
    with pytest.raises(NonFiniteGradientError):
        take(MOST_LOST)


def test_zero_gradients_are_not_lost(caplog: pytest.LogCaptureFixture):
    watch = GradientWatch()
    for number in range(1, 2 * MOST_LOST):
        watch.check(step_with(number, 0.0))
    assert not caplog.records


def test_a_correction_that_excludes_every_token_is_a_warning_and_ends_the_run_if_it_goes_on(
    caplog: pytest.LogCaptureFixture,
):
    watch = GradientWatch()

    def take(number: int, excluded_by: str | None) -> None:
        step = step_with(number, 0.0)
        step.excluded_by = excluded_by
        watch.check(step)

    for number in range(1, MOST_LOST):
        take(number, "algorithm.correction.reject")
    take(MOST_LOST, None)
    assert len(caplog.records) == 1
    assert "step 1: algorithm.correction.reject excluded every token of the batch" in caplog.text
    for number in range(MOST_LOST + 1, 2 * MOST_LOST):
        take(number, "algorithm.correction.reject")
    with pytest.raises(
        NothingTrainedError, match=r"step 20 of train: algorithm.correction.reject has excluded every tok"
    ):
        take(2 * MOST_LOST, "algorithm.correction.reject")


def test_the_step_at_which_a_run_ends_is_logged(tmp_path: Path):
    session, taken = session_of(tmp_path, trainer=Trainer(steps=2 * MOST_LOST)), list[int]()
    logged = cast(RecordingRun, session.run).logged

    def train() -> None:
        for step in session.steps("train", 2 * MOST_LOST):
            step.record_optimizer_steps([{"actor/grad_norm": math.nan, "actor/skipped_steps": 1.0}])
            taken.append(step.number)

    with pytest.raises(NonFiniteGradientError):
        train()
    assert taken == list(range(1, MOST_LOST + 1))
    assert logged[-1] == ("train", MOST_LOST)
