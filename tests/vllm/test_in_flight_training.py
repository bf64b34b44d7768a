"""Runs whose engines get new weights while they sample: killed, they go on with the next prompts; engines may die."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ledger import lineage, problems_of
from rlpack.data.sampler import prompt_positions
from tests.end_to_end.commands import DEADLINE_S, Command, committed, done, records, started, until
from tests.end_to_end.settings import FIRST_CHARACTER, UNEVEN
from tests.vllm.engines import engine_processes

LEAD, STEPS, PROMPTS = 2, 12, 8
GROUP, TRAIN_SIZE = 4, 256  # of UNEVEN
OVERRIDES: Sequence[str] = (
    *UNEVEN,
    "rollout=vllm",
    "placement=two_pools",
    "rollout.publish=in_flight",
    f"trainer.lead={LEAD}",
    "rollout.max_new_tokens=120",
    "batching.max_tokens=256",
    "rollout.kv_cache_gb=0.2",
    "sft_warmup.steps=4",
    f"trainer.steps={STEPS}",
    "evaluation.every=6",
    "checkpoint.every=2",
    "checkpoint.asynchronous=true",
)

pytestmark = pytest.mark.slow
# A run takes 25 s; `make test-vllm-long` kills one twice, and runs one with late groups.
IS_LONG = os.environ.get("RLPACK_IN_FLIGHT") == "all"
KILLED_AT = (3, 7) if IS_LONG else (3,)
long = pytest.mark.skipif(not IS_LONG, reason="`make test-vllm-long` runs it")


def trained(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in records(run_dir) if record["phase"] == "train"]


def check_ledger(run: Command) -> None:
    """Check that every step trained on the prompts after those of the step before, within the bound."""
    steps = trained(run.run_dir)
    assert [(one["step"], one["prompts_consumed"]) for one in steps] == [(n, PROMPTS * n) for n in range(1, STEPS + 1)]
    lags = [one["rollout/lag"] for one in steps]
    assert max(lags) == LEAD, "nothing ran ahead"
    assert all(one["rollout/canary_gap"] <= 1e-4 for one in steps if "rollout/canary_gap" in one)
    assert run.left_behind() == []


def test_a_run_that_is_killed_trains_on_every_prompt_once(tmp_path: Path):
    # The recipe is GRPO that records what it trains on. `benchmarks/in_flight_kills.py` kills more often.
    words = (*OVERRIDES, "recipe.target=benchmarks.ledger", "algorithm.kl_coef=0", "seed=1", "resume=auto")
    for step in KILLED_AT:
        with started(tmp_path, *words, ranks=1, forks_workers=False) as command:
            command.wait_for("train", step)
            until(lambda run_dir=command.run_dir: bool(committed(run_dir, "train")), DEADLINE_S)
            command.process.kill()
            assert command.wait() == -9
            assert command.left_behind() == []
        assert committed(command.run_dir, "train")[-1] < STEPS
    check_ledger(done(tmp_path, *words, ranks=1))
    found = lineage(tmp_path / "run")
    _, rows = prompt_positions(1, TRAIN_SIZE, 0, PROMPTS * STEPS)
    assert len(found.entries) == STEPS
    assert problems_of(found, [f"train-{row}" for row in rows], PROMPTS, GROUP, LEAD) == []


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Run to the end, and kill all engines twice."""
    with started(tmp_path_factory.mktemp("disturbed"), *OVERRIDES, ranks=1) as command:
        for step in (3, 7):
            command.wait_for("train", step)
            engines = engine_processes(command)
            assert engines
            for process in engines:
                process.kill()
        assert command.wait() == 0, command.err
    return command


def test_engines_that_die_while_batches_are_in_flight_are_replaced(disturbed: Command):
    check_ledger(disturbed)
    assert "starts a new engine in place of one that failed" in (disturbed.run_dir / "run.log").read_text()


def test_an_engine_that_hangs_while_batches_are_in_flight_is_replaced(tmp_path: Path):
    with started(tmp_path, *OVERRIDES, "rollout.request_timeout_s=10", ranks=1) as command:
        command.wait_for("train", 3)
        (engine,) = engine_processes(command)
        engine.suspend()
        assert command.wait() == 0, command.err
    check_ledger(command)
    log = (command.run_dir / "run.log").read_text()
    assert "rollout.request_timeout_s=10" in log
    assert "starts a new engine in place of one that failed" in log


def test_a_resumed_run_keeps_its_way_to_publish(disturbed: Command):
    words = (*OVERRIDES, "resume=auto", "rollout.publish=drain", "trainer.lead=1")
    with started(disturbed.folder, *words, ranks=1) as command:
        assert command.wait() == 2
    assert "rollout.publish ('drain', was 'in_flight')" in command.err


@pytest.mark.parametrize(
    ("words", "lead"),
    [
        pytest.param(("rollout.kv_cache=keep",), LEAD, id="grpo_keep"),
        pytest.param(("recipe=ppo",), LEAD, id="ppo", marks=long),
        pytest.param(("recipe=dapo", "dapo.overlong_buffer=2"), 1, id="dapo", marks=long),
        pytest.param(("recipe=remax",), LEAD, id="remax", marks=long),
    ],
)
def test_other_recipes_and_kept_caches_train_within_the_bound(tmp_path: Path, words: Sequence[str], lead: int):
    others = ("trainer.steps=6", "checkpoint.every=6", f"trainer.lead={lead}", *FIRST_CHARACTER, *words)
    run = done(tmp_path, *OVERRIDES, *others, ranks=1)
    taken = trained(run.run_dir)
    assert [one["step"] for one in taken] == list(range(1, 7))
    prompts = [one["prompts_consumed"] for one in taken]
    if "recipe=dapo" in words:  # it draws until its batch is full
        assert all(after - before >= PROMPTS for before, after in pairwise([0, *prompts]))
    else:
        assert prompts == [PROMPTS * step for step in range(1, 7)]
    assert max(one["rollout/lag"] for one in taken) == lead, "nothing ran ahead"
    assert all(one["actor/grad_norm"] > 0 for one in taken)
    for one in taken:
        assert one.get("rollout/canary_gap", 0) <= 1e-4
        # The log-prob of a token is that of the weights that sampled it; kept keys and values are of older ones.
        assert one.get("mismatch/lag_0/gap", 0) <= (0.05 if "rollout.kv_cache=keep" in words else 1e-4)


@long
def test_late_groups_are_trained_on_once_and_resumed_runs_begin_with_those_of_the_checkpoint(tmp_path: Path):
    words = (
        *OVERRIDES,
        *("recipe.target=benchmarks.ledger", "algorithm.kl_coef=0", "seed=1", "resume=auto"),
        *("trainer.late_groups.window=3", "trainer.late_groups.share=0.5"),
        *("trainer.lead=1", "rollout.max_new_tokens=64"),  # so that steps wait for responses
    )
    with started(tmp_path, *words, ranks=1, forks_workers=False) as command:
        command.wait_for("train", 5)
        until(lambda: bool(committed(command.run_dir, "train")), DEADLINE_S)
        command.process.kill()
        assert command.wait() == -9
    done(tmp_path, *words, ranks=1)
    found, steps = lineage(tmp_path / "run"), trained(tmp_path / "run")
    _, rows = prompt_positions(1, TRAIN_SIZE, 0, PROMPTS * STEPS)
    assert sorted(uid for uids in found.uids for uid in uids) == sorted(
        f"train-{row}" for row in rows for _ in range(GROUP)
    )
    assert sum(one["rollout/late_groups"] for one in steps) > 0, "no group was late"
    assert steps[-1]["rollout/groups_left"] == 0
    assert 0 <= min(found.lags) <= max(found.lags) <= 1 + 3 - 1  # the lead, and a window of 3
