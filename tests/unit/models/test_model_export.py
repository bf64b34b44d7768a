"""Exported folders, against transformers' own `save_pretrained`."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter

from benchmarks.family_configs import tiny_config
from rlpack.config.sections.optimization import Lora
from rlpack.models.adapters import add_adapters
from rlpack.models.model_export import INDEX, export_model, plan_export
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.weight_stream import WeightStream
from tests.unit.models.test_stored_model import TYPES


def new_model(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=dtype)


def assert_same_folder(found: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize("model_type", [*TYPES, "gpt2", "bert", "apertus"])
def test_files_are_those_of_save_pretrained(tmp_path: Path, model_type: str):
    model = new_model(model_type)
    model.save_pretrained(tmp_path / "expected")
    export_model(PackedModel(model), tmp_path / "found")
    assert_same_folder(tmp_path / "found", tmp_path / "expected")


@pytest.mark.parametrize("generation", [{"temperature": 0.9, "top_p": 0.6}, {"do_sample": False, "top_k": 20}])
def test_a_generation_config_that_save_pretrained_refuses_is_exported(tmp_path: Path, generation: dict[str, Any]):
    generation |= {"bos_token_id": 1, "eos_token_id": 2}
    new_model("llama").save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "generation_config.json"
    path.write_text(json.dumps(generation), encoding="utf-8")
    # As published models have them: transformers 5.19 saves none of these, later versions only unchanged ones.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.generation_config.max_new_tokens = 8
    loaded = model.generation_config
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path / "refused")
    export_model(PackedModel(model), tmp_path / "found")
    found = json.loads((tmp_path / "found" / path.name).read_text(encoding="utf-8"))
    assert found == generation | {"max_new_tokens": 8, "transformers_version": transformers.__version__}
    assert model.generation_config is loaded


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_neox", "gemma3_text"])
def test_a_loaded_model_is_saved_in_the_form_of_its_files(tmp_path: Path, model_type: str):
    new_model(model_type).save_pretrained(tmp_path / "expected")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "expected")
    export_model(PackedModel(model), tmp_path / "found")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("found", "expected"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_many_files_have_the_tensors_and_the_index_of_save_pretrained(tmp_path: Path):
    model = new_model("qwen3_moe", torch.bfloat16)
    model.save_pretrained(tmp_path / "expected", max_shard_size=9000)
    export_model(PackedModel(model), tmp_path / "found", file_bytes=9000)
    found, expected = (json.loads((tmp_path / name / INDEX).read_text()) for name in ("found", "expected"))
    assert found["metadata"] == expected["metadata"]
    files = {path.name: load_file(path) for path in (tmp_path / "found").glob("*.safetensors")}
    assert len(files) > 3
    assert all(sum(tensor.nbytes for tensor in tensors.values()) <= 9000 for tensors in files.values())
    assert found["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    for path in (tmp_path / "expected").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(files[found["weight_map"][name]][name], tensor)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "found", dtype=torch.bfloat16)
    assert all(torch.equal(weight, loaded.get_parameter(name)) for name, weight in model.named_parameters())


def test_the_index_counts_the_weights_of_the_merged_model(tmp_path: Path):
    model = new_model("llama")
    expected = model.num_parameters()
    add_adapters(model, Lora(rank=2), seed=0)
    export_model(PackedModel(model), tmp_path, file_bytes=9000)
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_parameters"] == expected


def test_own_names_are_those_of_the_modules(tmp_path: Path):
    model = new_model("mixtral")
    export_model(PackedModel(model), tmp_path, published_names=False)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("model_type", ["llama", "llama4_text"])
def test_a_headless_model_loads_as_a_language_model_and_as_itself(tmp_path: Path, model_type: str):
    base = language_model(new_model(model_type))
    export_model(PackedModel(base), tmp_path)
    for kind in (AutoModelForCausalLM, AutoModel):
        loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert set(report["missing_keys"]) <= {"lm_head.weight"}
        weights = dict(language_model(loaded).named_parameters())
        assert all(torch.equal(weight, weights[name]) for name, weight in base.named_parameters())


def test_weights_are_converted_one_by_one_where_transformers_allows_it():
    for model_type in ("qwen3_moe", "mixtral", "llama"):
        model = new_model(model_type)
        specs = [bucket[0] for bucket in WeightStream(PackedModel(model), bucket_bytes=0).layout.buckets]
        plan = plan_export(model, specs, published_names=True, file_bytes=10**9)
        assert all(len(group) == 1 for group in plan.groups)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "model.safetensors").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        export_model(PackedModel(new_model("llama")), tmp_path)


def test_weights_that_transformers_joins_are_gathered_together(tmp_path: Path):
    model = new_model("llama")
    parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    model._weight_conversions = [WeightConverter("self_attn.qkv.weight", parts, [Chunk(0)])]
    export_model(PackedModel(model), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    joined = torch.cat([model.get_parameter(f"model.layers.1.{part}") for part in parts])
    assert torch.equal(found["model.layers.1.self_attn.qkv.weight"], joined)
    specs = [bucket[0] for bucket in WeightStream(PackedModel(model), bucket_bytes=0).layout.buckets]
    plan = plan_export(model, specs, published_names=True, file_bytes=10**9)
    joined_groups = [group for group in plan.groups if len(group) > 1]
    assert sorted(joined_groups[0]) == sorted(f"model.layers.0.{part}" for part in parts)
    assert len(joined_groups) == model.config.num_hidden_layers
    assert set(plan.groups) - set(joined_groups) == plan.views.keys()
    assert plan.not_alone is None


class Listed(ConversionOps):
    """Joins weights under a name that says which they are."""

    def convert(self, input_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        names = [name.split(".")[1] for name in input_dict]
        return {f"{options['full_layer_name']}.{names}": torch.cat([each[0] for each in input_dict.values()])}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def test_a_conversion_of_all_weights_at_once_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = new_model("llama")
    parts = [f"mlp.{name}_proj.weight" for name in ("gate", "up")]
    model._weight_conversions = [WeightConverter("mlp.gate_up.weight", parts, [Listed()])]
    with caplog.at_level(logging.WARNING, "rlpack.models.model_export"):
        export_model(PackedModel(model), tmp_path, num_ranks=2)
    (record,) = caplog.records
    assert "every rank that writes a file gathers all" in record.getMessage()
    assert "mlp.gate_up.weight" in record.getMessage()
    found = load_file(tmp_path / "model.safetensors")
    joined = torch.cat([model.get_parameter(f"model.layers.0.{part}") for part in parts])
    assert torch.equal(found["model.layers.0.mlp.gate_up.weight.['gate_proj', 'up_proj']"], joined)
    caplog.clear()
    export_model(PackedModel(new_model("llama")), tmp_path, num_ranks=2)
    assert not caplog.records
