"""Models that don't say which tokens they have, as repositories with code of their own may hold them."""

import json
import sys
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from rlpack.config.schema import Model
from rlpack.models.errors import ModelError
from rlpack.models.loading import build_causal_lm, build_meta_model

CODE = """
import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel


class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, width=8, {arguments}**options):
        {assignment}
        self.width = width
        super().__init__(**options)


class OwnModel(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens = torch.nn.Embedding(11, config.width)
        self.post_init()

    {method}
"""
EMBEDDING = "def get_input_embeddings(self):\n        return self.tokens"


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep transformers' copies of the code out of the user's cache."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path.copy())


def save(folder: Path, *, vocab_size: bool, method: str) -> Model:
    """Write a repository with its own model class."""
    code = CODE.format(
        arguments="vocab_size=11, " if vocab_size else "",
        assignment="self.vocab_size = vocab_size" if vocab_size else "pass",
        method=method or "pass",
    )
    (folder / "own.py").write_text(code)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    return Model(path=str(folder), trust_remote_code=True)


@pytest.mark.parametrize(
    ("vocab_size", "method", "message"),
    [
        (True, "", r"OwnModel has no input embedding \(get_input_embeddings\(\) gives none\)"),
        (True, "def get_input_embeddings(self):\n        return self", r"no input embedding .* gives a OwnModel"),
        (False, EMBEDDING, r"OwnModel has no vocab_size in its config.*\(the model has 11 embeddings\)"),
        (True, EMBEDDING, r"the tokenizer has 12 tokens and the model 11"),
    ],
)
def test_a_model_that_does_not_say_its_tokens_is_refused_by_name(tmp_path: Path, vocab_size, method, message):
    with pytest.raises(ModelError, match=message):
        build_meta_model(save(tmp_path, vocab_size=vocab_size, method=method), vocab_size=12)


def test_loading_its_weights_refuses_it_too(tmp_path: Path):
    model = save(tmp_path, vocab_size=False, method=EMBEDDING)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"OwnModel has no vocab_size"):
        build_causal_lm(model, vocab_size=11, attention_name="eager")
