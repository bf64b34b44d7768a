"""Which architectures vLLM runs, from the source of its registry."""

import pytest
from transformers import GPTNeoForCausalLM, HeliumForCausalLM, Qwen2ForCausalLM

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.architectures import architecture_problem, supported_architectures
from tests.unit.rollout.vllm.test_classifier_arguments import registry

__all__ = ["registry"]


def test_a_model_that_neither_vllm_nor_its_transformers_backend_runs_has_a_problem():
    assert architecture_problem(Qwen2ForCausalLM) is None  # vLLM's own
    assert architecture_problem(HeliumForCausalLM) is None  # transformers' implementation, with vLLM's attention
    assert (architecture_problem(GPTNeoForCausalLM) or "").startswith("the installed vLLM has no GPTNeoForCausalLM, ")


def test_a_registry_of_another_form_is_named(registry):
    registry.write_text("MODELS = load()")
    with pytest.raises(EngineError, match=r"registry\.py has no table of models; rlpack works with vLLM"):
        supported_architectures()
    registry.unlink()
    with pytest.raises(EngineError, match=r"can't be read from .*registry\.py"):
        supported_architectures()
