"""Models with quantized weights are exported as models that transformers loads with the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.family_configs import tiny_config
from rlpack.config.schema import Model
from rlpack.models.errors import ModelError
from rlpack.models.file_names import WEIGHTS
from rlpack.models.loading import build_causal_lm
from rlpack.models.model_export import export_model
from rlpack.models.policy import Policy
from rlpack.models.quantized import check_quantization
from rlpack.models.stored_weights import check_weight_files

# The numbers that MXFP4's 16 codes stand for (OCP Microscaling Formats 1.0, E2M1).
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def save_quantized(folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    model.save_pretrained(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def save_fp8(folder: Path, model_type: str) -> dict[str, Tensor]:
    """Save a model with its projections in FP8; return what its files stand for."""
    config = tiny_config(model_type)
    config.hidden_size = config.intermediate_size = config.moe_intermediate_size = 64
    config.head_dim = 32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    exact = load_file(folder / WEIGHTS)
    for name, weight in list(exact.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        blocks = weight.view(weight.shape[0] // 32, 32, weight.shape[1] // 32, 32)
        scales = blocks.abs().amax((1, 3)) / 448
        stored[name] = (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        values = stored[name].float().view(blocks.shape) * scales[:, None, :, None]
        exact[name] = values.view(weight.shape)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "fmt": "e4m3"}
    save_quantized(folder, model, stored, settings)
    return exact


def save_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Save a gpt-oss with its experts in MXFP4; return what its files stand for."""
    config = tiny_config("gpt_oss")
    config.hidden_size = config.intermediate_size = 64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    exact = load_file(folder / WEIGHTS)
    for name, weight in list(exact.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32))
        stored[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        stored[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 127 - 5, dtype=torch.uint8)
        exact[name] = (FP4[codes] * 2.0**-5).view(experts, outputs, inputs).transpose(1, 2)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    save_quantized(folder, model, stored, settings)
    return exact


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "mxfp4"])
def test_the_export_has_the_weights_that_the_files_stand_for(tmp_path: Path, kind: str):
    exact = save_mxfp4(tmp_path / "in") if kind == "mxfp4" else save_fp8(tmp_path / "in", kind)
    lm = build_causal_lm(Model(path=str(tmp_path / "in")), attention_name="eager")
    assert {weight.dtype for weight in lm.parameters()} == {torch.float32}
    export_model(Policy(lm), tmp_path / "out")
    exported = load_file(tmp_path / "out" / WEIGHTS)
    assert exported.keys() == exact.keys()
    for name, weight in exact.items():
        torch.testing.assert_close(exported[name], weight, msg=name, rtol=2**-8, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    row = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(loaded(row).logits, lm.eval()(row).logits)


def test_missing_weights_are_found_before_quantized_models_are_loaded(tmp_path: Path):
    save_fp8(tmp_path, "qwen3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    check_weight_files(model, str(tmp_path), "model.path")
    stored = load_file(tmp_path / WEIGHTS)
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        check_weight_files(model, str(tmp_path), "model.path")


def test_methods_that_keep_weights_quantized_are_refused(tmp_path: Path):
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128}
    save_quantized(tmp_path, model, dict(model.state_dict()), settings)
    problem = r"quantized by awq \(quantization_config\).*or are by fp8 or mxfp4"
    with pytest.raises(ModelError, match=problem):
        check_quantization(AutoConfig.from_pretrained(tmp_path), "model.path")
    with pytest.raises(ModelError, match=problem):
        build_causal_lm(Model(path=str(tmp_path)))
