"""`rlpack evaluate` with vLLM: the `hf` engine finds the same greedy tokens, a run's type is its evaluation's.

Killed and continued, it writes the same files.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.commands import DEADLINE_S, Command, done, records, started_words, until
from tests.end_to_end.test_evaluation import FILES, FOLDER, ROWS, SLOW, SMALL, evaluated, rows_of

pytestmark = pytest.mark.slow
RUN = (
    *("rollout=vllm", "rollout.lora=adapter", "experiment=lora", "rollout.kv_cache_gb=0.05", "trainer.steps=1"),
    *("sft_warmup.steps=20", "rollout.max_new_tokens=12", "placement.pools.main.ranks=1", "trainer.prompts_per_step=8"),
    *("trainer.group_size=4", "trainer.mini_batch_size=16", "evaluation.samples=1"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return done(tmp_path_factory.mktemp("adapters"), *RUN)


def test_a_run_in_bf16_is_evaluated_in_bf16_with_the_rewards_of_its_own_evaluation(tmp_path: Path):
    overrides = ("evaluation.every=1", "data.generator.validation_size=8", "evaluation.samples=8")
    run = done(tmp_path, "rollout=vllm", "actor.precision=bf16", *RUN[3:-1], *overrides)
    own = [record for record in records(run.run_dir) if record["phase"] == "evaluation"][-1]
    responses = {}
    for dtype, given in (("bf16", []), ("fp32", ["rollout.dtype=fp32"])):
        words = ["evaluate", str(run.run_dir), f"evaluate.output_dir={dtype}", *given]
        with started_words(tmp_path, words, tmp_path / dtype) as command:
            assert command.wait() == 0, command.err
        assert f"vllm generates in {dtype}" in command.out
        document = json.loads((tmp_path / dtype / "results.json").read_text())
        assert (document["engine"], document["dtype"]) == ("vllm", dtype)
        rows = map(json.loads, (tmp_path / dtype / "samples.jsonl").read_text().splitlines())
        responses[dtype] = [(row["prompt_index"], row["sample"], row["response"]) for row in rows]
        if dtype == "bf16":
            statistics = {name: one["value"] for name, one in document["statistics"].items()}
            assert statistics["mean_reward"] == pytest.approx(own["evaluation/reward_sampled"], abs=1e-6)
            assert statistics["greedy_mean"] == pytest.approx(own["evaluation/reward_greedy"], abs=1e-6)
    assert responses["bf16"] != responses["fp32"]  # the type is the engine's, not only the printed one


def greedy(folder: Path, run: Command, *overrides: str, output: str) -> dict[str, str]:
    """Return the greedy completion of each prompt."""
    words = ["evaluate", str(run.run_dir), "evaluate.samples=1", f"evaluate.output_dir={output}", *overrides]
    with started_words(folder, words, folder / output) as command:
        assert command.wait() == 0, command.err
        assert command.left_behind() == []
    rows = [json.loads(line) for line in (folder / output / "samples.jsonl").read_text().splitlines()]
    return {row["prompt"]: row["response"] for row in rows if row["sample"] is None}


def test_both_engines_have_the_same_greedy_completions(run: Command, tmp_path: Path):
    with_vllm = greedy(tmp_path, run, output="with_vllm")
    with_hf = greedy(tmp_path, run, "rollout.engine=hf", "rollout.kv_cache_gb=null", output="with_hf")
    assert len(with_vllm) > 50
    assert with_vllm == with_hf


def test_an_evaluation_of_a_model_folder_that_is_killed_and_continued_writes_the_files_of_an_uninterrupted_one(
    run: Command, tmp_path: Path
):
    (tmp_path / "slow.py").write_text(SLOW)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    model = str(shutil.copytree(run.run_dir / "model", tmp_path / "model"))
    words = (*FOLDER, *SMALL, "rollout=vllm", "rollout.kv_cache_gb=0.05")
    whole = evaluated(tmp_path, model, *words, output="whole")
    killed = ["evaluate", model, "evaluate.output_dir=killed", *words]
    with started_words(tmp_path, killed, tmp_path / "killed", forks_workers=False) as command:
        until(lambda: len(rows_of(tmp_path / "killed")) >= 3, DEADLINE_S)
        command.process.kill()
        assert command.wait() == -9
        assert command.left_behind() == []  # vLLM's processes included
    assert 3 <= len(rows_of(tmp_path / "killed")) < 18
    assert not (tmp_path / "killed" / "results.json").exists()
    continued = evaluated(tmp_path, model, *words, output="killed")
    assert "continuing after" in continued.out
    assert "vllm generates in fp32" in whole.out
    for name in FILES:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
