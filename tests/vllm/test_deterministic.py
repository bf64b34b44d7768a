"""`rollout.deterministic` with vLLM: the engine starts only if its rows don't depend on each other."""

import pytest

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm import vllm_engine
from tests.vllm.engines import start


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_on_a_cpu_passes_the_trial(dtype: str):
    start("qwen2", tied=False, dtype=dtype, deterministic=True).close()


def test_an_engine_that_fails_the_trial_is_ended(monkeypatch: pytest.MonkeyPatch):
    stopped = []

    def refuse(engine: vllm_engine.VLLMEngine, *, max_length: int) -> None:
        stopped.extend(engine._started.processes)
        raise EngineError("rounds by what it runs together")

    monkeypatch.setattr(vllm_engine, "check_deterministic", refuse)
    with pytest.raises(EngineError, match="rounds by"):
        start("qwen2", tied=False, deterministic=True)
    assert stopped
    assert not any(process.is_alive() for process in stopped)
