"""A rank that generates a batch ahead, or the whole run, is killed: the run ends as if nothing had happened."""

import os
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import GRACE_S, SETTINGS, fired, is_same, restarts_of, started, wait
from tests.faults.table import PHASES

# `make test-long` runs this.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif("RLPACK_FAULTS_AHEAD" not in os.environ, reason="some 60 runs, 20 minutes in all"),
]
KILLED_IN = [phase for phase in PHASES if phase != "start"]
STEPS = len(KILLED_IN) + 2
SHARED = (
    *SETTINGS,
    "placement=two_pools",
    "trainer.lead=1",
    f"trainer.steps={STEPS}",
    "placement.call_timeout_s=30",
)
AHEAD = (*SHARED, "evaluation.every=2")  # the batch that is drawn in step 2 doesn't wait for an evaluation
ENGINES = {"hf": (), "vllm": ("rollout=vllm", "rollout.kv_cache_gb=0.05")}
# Each turn kills every step in another phase.
TURNS = range(len(KILLED_IN) if os.environ.get("RLPACK_FAULTS_AHEAD") == "all" else 1)
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs the environment of `make vllm`")


def fault(phase: str, kind: str, step: int, by: str = "order", role: str = "rollout") -> dict[str, Any]:
    names = {"role": role, "rank": 0, "phase": phase, "fault": kind}
    return names | {"by": by, "step": step, "id": f"{phase} {kind} {step}"}


def run(folder: Path, plan: Sequence[dict[str, Any]], *words: str) -> Path:
    with started(folder, plan, words) as command:
        code, _ = wait(command, is_stopped=False)
        assert code == 0, command.err[-5000:]
    assert [one["id"] for one in fired(folder)] == [one["id"] for one in plan]
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("undisturbed"), [], *AHEAD)


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
    disturbed = run(tmp_path, plan, *AHEAD)
    assert restarts_of(disturbed) == {"rollout": 1}
    assert "in generate" in (disturbed / "run.log").read_text()
    assert is_same(disturbed, undisturbed)


def kills(turn: int) -> list[dict[str, Any]]:
    """Return a kill in every step, each in another phase; `turn` shifts the phases, so that all turns have all pairs.

    In the last step, nothing is generated or scored.
    """
    pairs = [(step, KILLED_IN[(step - 2 + turn) % len(KILLED_IN)]) for step in range(1, STEPS + 1)]
    return [
        fault(phase, "kill", step, by="signal", role="driver")
        for step, phase in pairs
        if step < STEPS or phase not in ("generate", "score")
    ]


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo", "remax"])
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=needs_vllm)])
def test_a_run_that_is_killed_in_every_step_and_phase_has_the_bits_of_one_that_nothing_stopped(
    tmp_path: Path, engine: str, recipe: str, turn: int
):
    words = (*SHARED, f"recipe={recipe}", *ENGINES[engine])
    undisturbed = run(tmp_path / "undisturbed", [], *words)
    killed = tmp_path / "killed"
    for plan in kills(turn):
        with started(killed, [plan], (*words, "resume=auto")) as command:
            code, _ = wait(command, is_stopped=False)
            assert code == -signal.SIGKILL, command.err[-5000:]
            assert not command.left_behind(GRACE_S)
    with started(killed, [], (*words, "resume=auto")) as command:
        code, _ = wait(command, is_stopped=False)
        assert code == 0, command.err[-5000:]
    assert [one["id"] for one in fired(killed)] == [plan["id"] for plan in kills(turn)]
    assert is_same(killed / "run", undisturbed)
