"""Files against the model that their config describes: all that load pass, and no others do."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.family_configs import tiny_config
from rlpack.config.schema import Model
from rlpack.models.errors import ModelError
from rlpack.models.loading import build_meta_model
from rlpack.models.stored_weights import check_weight_files

# Plain, tied, with fused experts, with renamed or split tensors, with recurrent layers, and with a Conv1D.
TYPES = ["llama", "gemma3_text", "qwen3_moe", "mixtral", "deepseek_v3", "phi3", "gpt2", "mamba", "jamba", "bert"]


def saved(folder: Path, model_type: str, **options: object) -> PreTrainedModel:
    """Save a model, and return it as the preflight checks build it."""
    AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).save_pretrained(folder, **options)
    return build_meta_model(Model(path=str(folder)))


def change(folder: Path, name: str, shape: tuple[int, ...] | None) -> None:
    """Replace a tensor in a folder's only file, or leave it out."""
    weights = load_file(folder / "model.safetensors")
    assert weights.pop(name) is not None
    if shape is not None:
        weights[name] = torch.zeros(shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", TYPES)
def test_saved_models_pass(tmp_path: Path, model_type: str):
    check_weight_files(saved(tmp_path, model_type), str(tmp_path), "model.path")


def test_models_in_several_files_pass_and_a_tensor_that_their_index_lacks_does_not(tmp_path: Path):
    model = saved(tmp_path, "llama", max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    check_weight_files(model, str(tmp_path), "model.path")
    weights = load_file(files[1])
    lost = sorted(weights)[0]
    save_file({name: weight for name, weight in weights.items() if name != lost}, files[1], metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"critic\.path is .* lack 1 weights of a LlamaForCausalLM, the first is {lost}"
    ):
        check_weight_files(model, str(tmp_path), "critic.path")


@pytest.mark.parametrize(
    ("model_type", "tensor"),
    [
        ("llama", "model.norm.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias"),
        ("mamba", "backbone.layers.0.mixer.D"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, model_type: str, tensor: str):
    model = saved(tmp_path, model_type)
    change(tmp_path, tensor, None)
    with pytest.raises(
        ModelError, match=rf"model\.path is .* lack 1 weights .* first is {tensor}; they would be random"
    ):
        check_weight_files(model, str(tmp_path), "model.path")


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path):
    model = saved(tmp_path, "llama")
    change(tmp_path, "model.layers.1.mlp.up_proj.weight", (47, 32))
    with pytest.raises(
        ModelError, match=r"first is model.layers.1.mlp.up_proj.weight: \[47, 32\] instead of \[48, 32\]"
    ):
        check_weight_files(model, str(tmp_path), "model.path")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_an_expert_that_the_files_lack_is_refused(tmp_path: Path, model_type: str):
    model = saved(tmp_path, model_type)
    change(tmp_path, "model.layers.1.mlp.experts.2.down_proj.weight", None)
    with pytest.raises(ModelError, match=r"first is model.layers.1.mlp.experts.down_proj: \[3, .* instead of \[4, "):
        check_weight_files(model, str(tmp_path), "model.path")


def test_what_has_no_headers_is_left_to_the_ranks(tmp_path: Path):
    model = saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    check_weight_files(model, str(tmp_path), "model.path")
    (tmp_path / "model.safetensors").unlink()
    check_weight_files(model, str(tmp_path), "model.path")
    check_weight_files(model, "owner/a-hub-name", "model.path")
