"""Why the experts that vLLM chooses can't be replayed: on a CPU, the released vLLM doesn't return them.

If this test fails, a new vLLM or Triton returns them: see "Routing of the engine" in docs/design.md.
"""

from pathlib import Path

import pytest

from rlpack.rollout.vllm.vllm_package import CPU_PACKAGE, installed_version
from tests.vllm.engines import causal_lm

IS_0_32 = (installed_version(CPU_PACKAGE) or "").startswith("0.32.")
# From 0.33 on, vLLM checks this only when it starts a worker.
NEEDS_OLDER = pytest.mark.skipif(not IS_0_32, reason="needs vLLM 0.32")
# What vLLM says with its default model runner, and with the one that returns experts.
RUNNERS = [(None, "requires Model Runner V2"), pytest.param("1", "Model Runner V2 requires Triton", marks=NEEDS_OLDER)]


@pytest.mark.parametrize(("runner", "reason"), RUNNERS)
def test_vllm_on_a_cpu_returns_no_routed_experts(
    runner: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from vllm import AsyncEngineArgs

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    causal_lm("qwen3_moe", tied=False, seed=0).save_pretrained(tmp_path)
    arguments = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match=reason):
        AsyncEngineArgs(str(tmp_path), enable_return_routed_experts=True, **arguments).create_engine_config()
    AsyncEngineArgs(str(tmp_path), **arguments)
