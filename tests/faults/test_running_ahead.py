"""A rank that generates a batch ahead dies: the run ends as if nothing had happened, whatever weights the actor has."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import SETTINGS, fired, is_same, restarts_of, started, wait

# `make test-long` runs this.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif("RLPACK_FAULTS_AHEAD" not in os.environ, reason="three runs of a minute in all"),
]
STEPS = 4
AHEAD = (
    *SETTINGS,
    "placement=two_pools",
    "trainer.lead=1",
    f"trainer.steps={STEPS}",
    "placement.call_timeout_s=30",
)


def fault(phase: str, kind: str, step: int, by: str = "order") -> dict[str, Any]:
    names = {"role": "rollout", "rank": 0, "phase": phase, "fault": kind}
    return names | {"by": by, "step": step, "id": f"{phase} {kind}"}


def run(folder: Path, plan: Sequence[dict[str, Any]]) -> Path:
    with started(folder, plan, AHEAD) as command:
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
    ],
    ids=["draw", "update"],
)
def test_a_batch_is_generated_again_with_the_weights_that_it_began_with(
    undisturbed: Path, tmp_path: Path, plan: list[dict[str, Any]]
):
    disturbed = run(tmp_path, plan)
    assert restarts_of(disturbed) == {"rollout": 1}
    assert "in generate" in (disturbed / "run.log").read_text()
    assert is_same(disturbed, undisturbed)
