"""`rlpack evaluate` with vLLM, on a run whose adapters vLLM applied: the `hf` engine finds the same greedy tokens."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import Command, done, started_words

pytestmark = pytest.mark.slow
RUN = (
    *("rollout=vllm", "rollout.lora=adapter", "experiment=lora", "rollout.kv_cache_gb=0.05", "trainer.steps=1"),
    *("sft_warmup.steps=20", "rollout.max_new_tokens=12", "placement.pools.main.ranks=1", "trainer.prompts_per_step=8"),
    *("trainer.group_size=4", "trainer.mini_batch_size=16", "evaluation.samples=1"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return done(tmp_path_factory.mktemp("adapters"), *RUN)


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
