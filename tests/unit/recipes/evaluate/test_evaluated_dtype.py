"""The type that an engine generates in, where neither the command nor a run says it."""

import pytest
import torch
from transformers import Qwen2Config

from rlpack.config.recipes import EVALUATE_TARGET, config_class
from rlpack.config.schema import Config, Model, Rollout
from rlpack.recipes.evaluate.evaluate_model import _with_dtype


def config_of(folder: str, **rollout) -> Config:
    return config_class(EVALUATE_TARGET)(model=Model(path=folder), rollout=Rollout(**rollout))


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "bf16"), (None, "fp32")],
)
def test_vllm_runs_a_folder_in_the_type_of_its_weights_as_served(tmp_path, saved, dtype):
    Qwen2Config(dtype=saved).save_pretrained(tmp_path)
    assert _with_dtype(config_of(str(tmp_path), engine="vllm")).rollout.dtype == dtype
    assert _with_dtype(config_of(str(tmp_path), engine="vllm", dtype="fp32")).rollout.dtype == "fp32"
    assert _with_dtype(config_of(str(tmp_path))).rollout.dtype == "fp32"  # hf
