"""Models loaded in parts, against transformers' own `from_pretrained`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.family_configs import tiny_config
from rlpack.config.schema import Model
from rlpack.models.errors import ModelError
from rlpack.models.loading import build_causal_lm
from rlpack.models.model_export import export_model
from rlpack.models.open_model import open_causal_lm
from rlpack.models.packed import PackedModel
from rlpack.models.stored_model import NotInPartsError, StoredModel

# Plain, tied, with stacked experts, with renamed or split tensors, with recurrent layers, and with a Conv1D.
TYPES = ["qwen2", "qwen3", "llama", "gemma3_text", "qwen3_moe", "mixtral", "gpt_neox", "deepseek_v3", "phi3", "jamba"]


def saved(folder: Path, model_type: str, **options: object) -> PreTrainedModel:
    """Save a model, and return it as transformers loads it."""
    AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).save_pretrained(folder, **options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def opened(folder: Path) -> StoredModel:
    return open_causal_lm(Model(path=str(folder)), attention_name="eager")


def assert_same(loaded: PreTrainedModel, truth: PreTrainedModel) -> None:
    for tensors in (PreTrainedModel.named_parameters, PreTrainedModel.named_buffers):
        found, expected = dict(tensors(loaded)), dict(tensors(truth))
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model_type", TYPES)
def test_weights_buffers_and_config_are_those_of_from_pretrained(tmp_path: Path, model_type: str):
    truth = saved(tmp_path, model_type, max_shard_size="20KB")
    GenerationConfig(temperature=0.3, do_sample=True).save_pretrained(tmp_path)
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    stored = opened(tmp_path)
    assert all(weight.is_meta for weight in stored.model.parameters())
    stored.materialize(stored.model, "cpu")
    assert_same(stored.model, truth)
    assert stored.model.config.to_dict() == truth.config.to_dict()
    assert stored.model.generation_config.to_dict() == truth.generation_config.to_dict()
    assert not stored.model.training


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_files_have_twice_are_tied_if_they_are_equal(tmp_path: Path, equal: bool):
    saved(tmp_path, "gemma3_text")
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * (1 if equal else 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    stored = opened(tmp_path)
    stored.materialize(stored.model, "cpu")
    assert_same(stored.model, truth)
    assert (stored.model.lm_head.weight is stored.model.model.embed_tokens.weight) == equal
    assert stored.model.all_tied_weights_keys == truth.all_tied_weights_keys


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma3"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("equal", [True, False])
def test_the_config_ties_weights_only_if_the_files_values_are_equal(
    tmp_path: Path, model_type: str, whole: bool, equal: bool, caplog: pytest.LogCaptureFixture
):
    tied = saved(tmp_path, model_type)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = tied.get_input_embeddings().weight.detach() * (1 if equal else 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if whole:
        model = build_causal_lm(Model(path=str(tmp_path)), attention_name="eager")
    else:
        stored = opened(tmp_path)
        stored.materialize(stored.model, "cpu")
        model = stored.model
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])
    assert model.config.tie_word_embeddings == model.config.get_text_config().tie_word_embeddings == equal
    export_model(PackedModel(model), tmp_path / "exported")
    exported = json.loads((tmp_path / "exported" / "config.json").read_text(encoding="utf-8"))
    assert exported.get("tie_word_embeddings", True) == equal
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(reloaded.lm_head.weight, weights["lm_head.weight"])
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("rlpack.")]
    assert len(messages) == (0 if equal else 1)
    assert all("different values" in message for message in messages)


def test_a_config_that_ties_further_weights_is_kept(tmp_path: Path):
    # Either both ties of BERT's head are declared, or none.
    saved(tmp_path, "bert")
    weights = load_file(tmp_path / "model.safetensors")
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"] * 2
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = opened(tmp_path).model
    assert len(model.all_tied_weights_keys) == 1
    assert model.config.tie_word_embeddings


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_is_read_under_either_name_also_without_the_head(tmp_path: Path, name: str):
    saved(tmp_path, "gemma3_text")
    weights = load_file(tmp_path / "model.safetensors")
    weights[name] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(truth.model.embed_tokens.weight, weights[name])
    whole, headless = opened(tmp_path), opened(tmp_path)
    whole.materialize(whole.model, "cpu")
    assert_same(whole.model, truth)
    headless.materialize(headless.model.model, "cpu")
    assert_same(headless.model.model, truth.model)


def test_bf16_files_are_loaded_as_fp32(tmp_path: Path):
    truth = saved(tmp_path, "qwen3_moe")
    truth.to(torch.bfloat16).save_pretrained(tmp_path)
    stored = opened(tmp_path)
    stored.materialize(stored.model, "cpu")
    assert_same(stored.model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_parts_outside_a_module_are_not_read(tmp_path: Path):
    saved(tmp_path, "llama")
    stored = opened(tmp_path)
    stored.materialize(stored.model.model, "cpu")
    assert stored.model.lm_head.weight.is_meta
    assert not any(weight.is_meta for weight in stored.model.model.parameters())


def test_missing_weights_and_other_shapes_are_named(tmp_path: Path):
    saved(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 weights of a LlamaForCausalLM, the first is model\.norm\.weight"):
        opened(tmp_path)
    save_file(weights | {"model.norm.weight": norm[:-1]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight: \[31\] instead of \[32\]"):
        opened(tmp_path)


def test_what_only_transformers_can_load_is_refused_with_the_reason(tmp_path: Path):
    with pytest.raises(NotInPartsError, match="its weights are new"):
        open_causal_lm(Model(config={"model_type": "llama"}))
    with pytest.raises(NotInPartsError, match=r"trust_remote_code=true"):
        open_causal_lm(Model(path=str(tmp_path), trust_remote_code=True))
    saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(NotInPartsError, match="SafetensorError"):
        opened(tmp_path)
