"""A rank that generates a batch ahead, or the whole run, is killed: the run ends as if nothing had happened."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import GRACE_S, SETTINGS, fired, is_same, restarts_of, started, wait
from tests.faults.table import PHASES

# `make test-long` runs this.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif("RLPACK_FAULTS_AHEAD" not in os.environ, reason="some 45 runs, 15 minutes in all"),
]
# A phase in each step but the first, whose checkpoint the second needs, and the last, during which none is generated.
KILLED_IN = [phase for phase in PHASES if phase != "start"]
STEPS = len(KILLED_IN) + 2
AHEAD = (
    *SETTINGS,
    "placement=two_pools",
    "trainer.lead=1",
    f"trainer.steps={STEPS}",
    "evaluation.every=2",  # the batch that is drawn in step 2 doesn't wait for an evaluation
    "placement.call_timeout_s=30",
)


def fault(phase: str, kind: str, step: int, by: str = "order", role: str = "rollout") -> dict[str, Any]:
    names = {"role": role, "rank": 0, "phase": phase, "fault": kind}
    return names | {"by": by, "step": step, "id": f"{phase} {kind}"}


def run(folder: Path, plan: Sequence[dict[str, Any]], *recipe: str) -> Path:
    with started(folder, plan, (*AHEAD, *recipe)) as command:
        code, _ = wait(command, is_stopped=False)
        assert code == 0, command.err[-5000:]
    assert [one["id"] for one in fired(folder)] == [one["id"] for one in plan]
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("undisturbed"), [])


@pytest.mark.parametrize(
    "plan",
    [
        [fault("generate", "kill", 2)],
        # While step 2 updates the actor, the batch of step 3 is still being generated.
        [fault("generate", "slow", 2), fault("update", "kill", 2, by="signal")],
        [fault("generate", "stop", 2)],
        [fault("generate", "lost reply", 2)],
    ],
    ids=["draw", "update", "hang", "lost reply"],
)
def test_a_batch_is_generated_again_with_the_weights_that_it_began_with(
    undisturbed: Path, tmp_path: Path, plan: list[dict[str, Any]]
):
    disturbed = run(tmp_path, plan)
    assert restarts_of(disturbed) == {"rollout": 1}
    assert "in generate" in (disturbed / "run.log").read_text()
    assert is_same(disturbed, undisturbed)


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo", "remax"])
def test_a_run_that_is_killed_in_every_phase_of_a_step_has_the_bits_of_one_that_nothing_stopped(
    tmp_path: Path, recipe: str
):
    undisturbed = run(tmp_path / "undisturbed", [], f"recipe={recipe}")
    killed = tmp_path / "killed"
    plans = [fault(phase, "kill", step, by="signal", role="driver") for step, phase in enumerate(KILLED_IN, start=2)]
    for plan in plans:
        with started(killed, [plan], (*AHEAD, f"recipe={recipe}", "resume=auto")) as command:
            code, _ = wait(command, is_stopped=False)
            assert code == -signal.SIGKILL, command.err[-5000:]
            assert not command.left_behind(GRACE_S)
    with started(killed, [], (*AHEAD, f"recipe={recipe}", "resume=auto")) as command:
        code, _ = wait(command, is_stopped=False)
        assert code == 0, command.err[-5000:]
    assert [one["phase"] for one in fired(killed)] == KILLED_IN
    assert is_same(killed / "run", undisturbed)
