"""vLLM's arguments for reward models; tests/vllm/test_serve_reward_model.py has the scores."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    PreTrainedConfig,
    Qwen2Config,
    RobertaConfig,
)

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.classifier_arguments import is_classifier, pad_token
from rlpack.rollout.vllm.server_arguments import command_line, server_arguments
from rlpack.rollout.vllm.server_options import ServerOptions

REGISTRY = """
_A = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM"), "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM")}
_B: dict[str, tuple[str, str]] = {"Gemma3ForCausalLM": ("g", "G"), "GPT2LMHeadModel": ("h", "H"),
    "BertModel": ("b", "B"), "BertLMHeadModel": ("b", "B"), "RobertaForCausalLM": ("r", "R"), **_A}
_PREVIOUSLY_SUPPORTED_MODELS = {"GPTNeoXForCausalLM": "0.1"}
"""
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 32}
SMALL = {**SIZES, "intermediate_size": 8, "vocab_size": 9, "num_labels": 1, "pad_token_id": 3}


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch) -> Path:
    """Put source files in the place of a vLLM's."""
    file = tmp_path / "model_executor" / "models" / "registry.py"
    file.parent.mkdir(parents=True)
    file.write_text(REGISTRY)
    monkeypatch.setattr("rlpack.rollout.vllm.architectures.vllm_folder", lambda: tmp_path)
    return file


def reward_model(kind: type[PreTrainedConfig] = Qwen2Config, name: str = "Any", **changes: Any) -> PreTrainedConfig:
    return kind(**(SMALL | changes), architectures=[f"{name}ForSequenceClassification"])


def arguments(config: PreTrainedConfig, **vllm: Any) -> dict[str, Any]:
    return server_arguments(config, ServerOptions(vllm=vllm, max_length=32), model="folder", name="mine")


def refusal(config: PreTrainedConfig) -> str:
    with pytest.raises(EngineError) as caught:
        arguments(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "architecture"), [(Qwen2Config, "Qwen2ForCausalLM"), (Gemma3TextConfig, "Gemma3ForCausalLM")]
)
def test_a_reward_model_runs_its_familys_language_model_and_gives_raw_scores(kind, architecture):
    given = arguments(reward_model(kind))
    assert (given["runner"], given["convert"]) == ("pooling", "classify")
    assert given["pooler_config"] == {"task": "classify", "seq_pooling_type": "LAST", "use_activation": False}
    assert given["hf_overrides"] == {"architectures": [architecture]}
    words = command_line(given)
    assert words[words.index("--pooler-config") + 1].endswith('"use_activation": false}')


def test_a_language_model_generates():
    config = Qwen2Config(**SMALL, architectures=["Qwen2ForCausalLM"])
    assert not is_classifier(config)
    assert not is_classifier(Qwen2Config(**SMALL))
    given = arguments(config)
    assert given["runner"] == "generate"
    assert not given.keys() & {"convert", "pooler_config", "hf_overrides"}


def test_a_users_overrides_join_ours():
    given = arguments(reward_model(), hf_overrides={"rope_theta": 5.0}, pooler_config={"logit_mean": 1.0})
    assert given["hf_overrides"] == {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 5.0}
    assert given["pooler_config"]["logit_mean"] == 1.0
    assert given["pooler_config"]["use_activation"] is False


def test_the_padding_token_is_the_configs():
    assert pad_token(reward_model()) == 3
    assert pad_token(reward_model(pad_token_id=None)) is None


def test_more_than_one_label_is_refused():
    assert "'folder' is a sequence classifier with 3 labels, but a reward model has 1" in refusal(
        reward_model(num_labels=3)
    )


def test_a_family_that_vllm_lacks_is_refused_with_the_way_out():
    assert refusal(reward_model(GPTNeoXConfig)) == (
        "'folder' is a gpt_neox reward model, but the installed vLLM has no GPTNeoXForCausalLM; score with it in the "
        "run itself, reward_model.path=folder"
    )


@pytest.mark.parametrize(("kind", "heads"), [(BertConfig, "classifier"), (RobertaConfig, "none")])
def test_a_head_that_vllm_does_not_load_is_refused(kind, heads):
    assert f"with the heads {heads}, but vLLM loads one linear head named score" in refusal(reward_model(kind))


def test_other_families_with_a_score_head_are_taken():
    config = GPT2Config(
        n_embd=64, n_head=2, n_layer=1, vocab_size=9, num_labels=1, architectures=["GPT2ForSequenceClassification"]
    )
    assert arguments(config)["hf_overrides"] == {"architectures": ["GPT2LMHeadModel"]}
