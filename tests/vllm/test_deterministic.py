"""`rollout.deterministic` with vLLM: the engine starts only if its rows don't depend on each other."""

import pytest

from rlpack.rollout.deterministic import check_deterministic
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm import vllm_engine
from tests.vllm.engines import start
from tests.vllm.test_adapters import RANK, SEED, adapted, send_adapters


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_on_a_cpu_passes_the_trial(dtype: str):
    start("qwen2", tied=False, dtype=dtype, deterministic=True).close()


def test_an_engine_that_fails_the_trial_is_ended(monkeypatch: pytest.MonkeyPatch):
    stopped = []

    def refuse(engine: vllm_engine.VLLMEngine, *, max_length: int, max_num_seqs: int) -> None:
        stopped.extend(engine._started.processes)
        raise EngineError("rounds by what it runs together")

    monkeypatch.setattr(vllm_engine, "check_deterministic", refuse)
    with pytest.raises(EngineError, match="rounds by"):
        start("qwen2", tied=False, deterministic=True)
    assert stopped
    assert not any(process.is_alive() for process in stopped)


def test_an_engine_with_adapters_is_tested_once_it_has_one(monkeypatch: pytest.MonkeyPatch):
    tested = []

    def check(engine: vllm_engine.VLLMEngine, *, max_length: int, max_num_seqs: int) -> None:
        tested.append(engine._adapters is not None and engine._adapters.in_use is not None)
        check_deterministic(engine, max_length=max_length, max_num_seqs=max_num_seqs)

    monkeypatch.setattr(vllm_engine, "check_deterministic", check)
    settings = {"lora": "adapter", "vllm": {"max_lora_rank": RANK}, "deterministic": True, "max_num_seqs": 32}
    engine = start("qwen2", tied=True, seed=SEED, **settings)
    try:
        assert tested == []
        for _ in range(2):
            send_adapters(engine, adapted("qwen2", tied=True))
        assert tested == [True]
    finally:
        engine.close()
