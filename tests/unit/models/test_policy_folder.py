import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from rlpack.data.tokenization import character_tokenizer
from rlpack.models.model_export import export_model
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.policy_folder import complete_policy_folder
from tests.builders import MODEL

TOKENIZER = character_tokenizer("abcdefghij")  # pads with 0 and ends with 1


def exported(folder: Path, **ids: Any) -> Path:
    """Export a tiny model with these ids in its config."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**MODEL, "vocab_size": len(TOKENIZER)}, **ids))
    export_model(PackedModel(model), folder)
    return folder


@pytest.mark.parametrize(
    ("base", "stops", "expected"),
    [
        ({"eos_token_id": 2, "pad_token_id": 3}, (), ([2, 1], 3)),  # a tokenizer with another end
        ({"eos_token_id": 2, "pad_token_id": None}, (5, 2), ([2, 1, 5], 0)),
        ({"eos_token_id": [4, 1]}, (5, 5), ([4, 1, 5], 0)),
        ({"eos_token_id": None}, (), (1, 0)),
        ({"eos_token_id": None}, (1,), (1, 0)),
    ],
)
def test_the_tokens_that_end_the_runs_responses_end_those_of_the_exported_model(
    tmp_path: Path, base: dict[str, Any], stops: tuple[int, ...], expected: tuple[int | list[int], int]
) -> None:
    folder = exported(tmp_path, **({"pad_token_id": None} | base))
    before = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    complete_policy_folder(folder, TOKENIZER, stop_token_ids=stops)
    found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert found == before | dict(zip(("eos_token_id", "pad_token_id"), expected, strict=True))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 1
    assert GenerationConfig.from_pretrained(folder).eos_token_id == expected[0]


def test_transformers_ends_a_response_at_the_runs_stop_token(tmp_path: Path) -> None:
    folder = exported(tmp_path, eos_token_id=2, pad_token_id=None)
    complete_policy_folder(folder, TOKENIZER, stop_token_ids=[5])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.register_forward_hook(lambda *_: torch.eye(len(TOKENIZER))[5].expand(1, 1, -1))
    assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False).tolist() == [[3, 4, 5]]


@pytest.mark.parametrize(("own", "stops"), [(1, ()), ([1, 4], ()), ([4, 1], (4,)), ([1, 1], (1,))])
def test_a_generation_config_that_has_all_of_them_is_unchanged(
    tmp_path: Path, own: int | list[int], stops: tuple[int, ...]
) -> None:
    path = exported(tmp_path, eos_token_id=own, pad_token_id=None) / "generation_config.json"
    before = path.read_bytes()
    complete_policy_folder(tmp_path, TOKENIZER, stop_token_ids=stops)
    assert path.read_bytes() == before


def test_a_model_that_cannot_generate_gets_its_tokenizer_alone(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**MODEL, "vocab_size": len(TOKENIZER)}))
    export_model(PackedModel(language_model(model)), tmp_path)
    complete_policy_folder(tmp_path, TOKENIZER, stop_token_ids=[5])
    assert not (tmp_path / "generation_config.json").exists()
    assert (tmp_path / "tokenizer.json").exists()
