"""Engines that hang or die: their rows are generated again from the same seeds, and counted; results are the same."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.commands import DEADLINE_S, Command, done, records, started, started_words, until, without_times
from tests.end_to_end.settings import FIRST_CHARACTER, UNEVEN
from tests.vllm.corrupting_rollout import RANK, VERSION
from tests.vllm.engines import engine_processes

STEPS, TIMEOUT_S = 4, 10
ENGINES = ("placement=two_pools", "placement.pools.engines.ranks=2")
OVERRIDES: Sequence[str] = (
    *UNEVEN,
    *FIRST_CHARACTER,
    *ENGINES,
    "rollout=vllm",
    f"rollout.request_timeout_s={TIMEOUT_S}",
    "rollout.kv_cache_gb=0.2",
    "rollout.max_new_tokens=120",
    "batching.max_tokens=256",
    # Generating takes seconds, and publishing weights a fraction of one.
    *("trainer.prompts_per_step=32", "trainer.group_size=8", "trainer.mini_batch_size=128"),
    "sft_warmup.steps=2",
    f"trainer.steps={STEPS}",
    "evaluation.every=2",
)
FAULTS = ("rollout/repeated_rows", "rollout/engines_replaced", "store/peak_bytes")

pytestmark = pytest.mark.slow


def without_faults(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in without_times(record).items() if name not in FAULTS}
        for record in records(run_dir)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Command:
    command = done(tmp_path_factory.mktemp("whole"), *OVERRIDES, ranks=1)
    trained = [record for record in records(command.run_dir) if record["phase"] == "train"]
    assert all(record["actor/grad_norm"] > 0 for record in trained), "without updates, every run is the undisturbed one"
    return command


def test_a_run_with_an_engine_that_hangs_waits_for_it_once_and_is_the_undisturbed_run(whole: Command, tmp_path: Path):
    with started(tmp_path, *OVERRIDES, ranks=1) as command:
        command.wait_for("evaluation", 0)
        until(lambda: len(engine_processes(command)) == 2, DEADLINE_S)
        stopped = engine_processes(command)[0]
        command.wait_for("train", 1)  # its weights are published, and the next batch is about to be generated
        os.kill(stopped.pid, signal.SIGSTOP)
        assert command.wait() == 0, command.err
        assert command.left_behind() == []
    assert without_faults(command.run_dir) == without_faults(whole.run_dir)
    found = records(command.run_dir)
    assert sum(record.get("rollout/engines_replaced", 0) for record in found) == 1
    assert sum(record.get("rollout/repeated_rows", 0) for record in found) > 0
    log = (command.run_dir / "run.log").read_text()
    assert "again from" in log
    assert f"no response within rollout.request_timeout_s={TIMEOUT_S} s" in log
    late = [record for record in found if record["phase"] == "train" and record["time/step_s"] > TIMEOUT_S]
    assert len(late) <= 1, "a second generation waited for the engine that hangs"
    one, other = (load_file(run.run_dir / "model" / "model.safetensors") for run in (command, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_an_engine_with_adapters_that_dies_is_replaced_at_the_next_publication(tmp_path: Path):
    with started(tmp_path, *OVERRIDES, "actor.lora.rank=4", "rollout.lora=adapter", ranks=1) as command:
        command.wait_for("train", 1)
        until(lambda: len(engine_processes(command)) == 2, DEADLINE_S)
        os.kill(engine_processes(command)[0].pid, signal.SIGKILL)
        assert command.wait() == 0, command.err
        assert command.left_behind() == []
    found = records(command.run_dir)
    assert sum(record.get("rollout/engines_replaced", 0) for record in found) == 1
    assert [record["step"] for record in found if record["phase"] == "train"] == list(range(1, STEPS + 1))


ROLES = "roles.rollout.target=tests.vllm.corrupting_rollout"


def test_a_live_engine_that_fails_the_canary_is_replaced_and_the_run_is_the_undisturbed_run(
    whole: Command, tmp_path: Path
):
    command = done(tmp_path, *OVERRIDES, f"{ROLES}:CorruptsOnce", ranks=1)
    assert without_faults(command.run_dir) == without_faults(whole.run_dir)
    found = records(command.run_dir)
    assert [record["rollout/engines_replaced"] for record in found if record.get("rollout/engines_replaced")] == [1]
    log = (command.run_dir / "run.log").read_text()
    assert f"log-probs of the canary at policy version {VERSION} differ" in log
    assert f"the engine of rank {RANK} is replaced" in log
    one, other = (load_file(run.run_dir / "model" / "model.safetensors") for run in (command, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_run_ends_if_the_new_engine_fails_the_canary_too(whole: Command, tmp_path: Path):
    with started(tmp_path, *OVERRIDES, f"{ROLES}:CorruptsTwice", ranks=1) as command:
        assert command.wait() == 1
        assert command.left_behind() == []
    where = f"rlpack train: role rollout, rank {RANK}, in publish, step {VERSION - 1} of train"
    error = f"CanaryError: log-probs of the canary at policy version {VERSION} differ from the trainer's"
    assert f"{where}: {error}" in command.err
    own, others = (
        [record for record in without_faults(run.run_dir) if record["phase"] == "train"] for run in (command, whole)
    )
    assert own == others[: VERSION - 2]  # a step's record comes after its weights are published


def test_an_evaluation_replaces_an_engine_that_died_and_counts_it(whole: Command, tmp_path: Path):
    found: dict[str, Any] = {}
    for output in ("undisturbed", "disturbed"):
        words = (
            # With two prompts, either engine has one in each part.
            *("evaluate", str(whole.run_dir), "evaluate.samples=8", "evaluate.prompts_per_part=2"),
            *(f"evaluate.output_dir={output}", "rollout.max_new_tokens=60"),
        )
        with started_words(tmp_path, list(words), tmp_path / output) as command:
            rows = tmp_path / output / "samples.jsonl"
            if output == "disturbed":
                # Found before the first rows, after which the others may take less time than the search.
                until(lambda command=command: len(engine_processes(command)) > 0, DEADLINE_S)
                pid = engine_processes(command)[0].pid
                until(lambda rows=rows: rows.exists() and rows.stat().st_size > 0, DEADLINE_S)
                os.kill(pid, signal.SIGKILL)
            assert command.wait() == 0, command.err
            assert command.left_behind() == []
        found[output] = (json.loads((tmp_path / output / "results.json").read_text()), rows.read_text())
    (one, one_rows), (other, other_rows) = found["undisturbed"], found["disturbed"]
    assert one_rows == other_rows
    assert (one["repeated_rows"], one["engines_replaced"]) == (0, 0)
    assert other["engines_replaced"] == 1
    assert 0 < other["repeated_rows"] <= 18, "a dead engine got rows more than once"
    counts = {"repeated_rows": 0, "engines_replaced": 0}
    assert one | counts == other | counts
