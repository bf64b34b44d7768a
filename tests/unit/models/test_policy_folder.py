import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from benchmarks.family_configs import tiny_config
from rlpack.config.schema import Model
from rlpack.data.tokenization import character_tokenizer
from rlpack.models.model_export import export_model
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.policy_folder import complete_policy_folder
from tests.builders import MODEL
from tests.file_sizes import no_larger_than

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
    complete_policy_folder(folder, Model(), TOKENIZER, stop_token_ids=stops)
    found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert found == before | dict(zip(("eos_token_id", "pad_token_id"), expected, strict=True))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 1
    assert GenerationConfig.from_pretrained(folder).eos_token_id == expected[0]


def test_transformers_ends_a_response_at_the_runs_stop_token(tmp_path: Path) -> None:
    folder = exported(tmp_path, eos_token_id=2, pad_token_id=None)
    complete_policy_folder(folder, Model(), TOKENIZER, stop_token_ids=[5])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.register_forward_hook(lambda *_: torch.eye(len(TOKENIZER))[5].expand(1, 1, -1))
    assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False).tolist() == [[3, 4, 5]]


@pytest.mark.parametrize(("own", "stops"), [(1, ()), ([1, 4], ()), ([4, 1], (4,)), ([1, 1], (1,))])
def test_a_generation_config_that_has_all_of_them_is_unchanged(
    tmp_path: Path, own: int | list[int], stops: tuple[int, ...]
) -> None:
    path = exported(tmp_path, eos_token_id=own, pad_token_id=None) / "generation_config.json"
    before = path.read_bytes()
    complete_policy_folder(tmp_path, Model(), TOKENIZER, stop_token_ids=stops)
    assert path.read_bytes() == before


def test_a_model_that_cannot_generate_gets_its_tokenizer_alone(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**MODEL, "vocab_size": len(TOKENIZER)}))
    export_model(PackedModel(language_model(model)), tmp_path)
    complete_policy_folder(tmp_path, Model(), TOKENIZER, stop_token_ids=[5])
    assert not (tmp_path / "generation_config.json").exists()
    assert (tmp_path / "tokenizer.json").exists()


IMAGES = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}}


def exported_gemma3(folder: Path) -> Path:
    """Export a tiny Gemma3ForConditionalGeneration."""
    export_model(PackedModel(AutoModelForCausalLM.from_config(tiny_config("gemma3"))), folder)
    return folder


def test_a_multimodal_models_processor_is_copied_from_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = exported_gemma3(tmp_path / "model")
    base = tmp_path / "base"
    base.mkdir()
    for name in ("preprocessor_config.json", "processor_config.json"):
        (base / name).write_text(json.dumps(IMAGES | {"file": name}), encoding="utf-8")
    complete_policy_folder(folder, Model(path=str(base)), TOKENIZER, stop_token_ids=[])
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    assert not (folder / "video_preprocessor_config.json").exists()
    assert AutoImageProcessor.from_pretrained(folder).size == IMAGES["size"]
    assert not caplog.records


def test_a_processors_file_that_is_copied_in_part_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, base = exported_gemma3(tmp_path / "model"), tmp_path / "base"
    base.mkdir()
    (base / "preprocessor_config.json").write_text(json.dumps(IMAGES | {"long": "x" * 10**6}), encoding="utf-8")
    (base / "processor_config.json").write_text(json.dumps(IMAGES), encoding="utf-8")
    with no_larger_than(10**5):
        complete_policy_folder(folder, Model(path=str(base)), TOKENIZER, stop_token_ids=[])
    assert "preprocessor_config.json could not be copied from" in caplog.text
    assert not (folder / "preprocessor_config.json").exists()
    assert (folder / "processor_config.json").exists()


def cached(cache: Path, name: str, files: dict[str, str]) -> None:
    """Write files of a Hub model into a cache."""
    folder, commit = cache / f"models--{name.replace('/', '--')}", "5" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit, encoding="utf-8")
    (folder / "snapshots" / commit).mkdir(parents=True)
    for file, text in files.items():
        (folder / "snapshots" / commit / file).write_text(text, encoding="utf-8")


def test_a_multimodal_models_processor_is_copied_from_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached(tmp_path / "cache", "some/model", {"preprocessor_config.json": json.dumps(IMAGES)})
    folder = exported_gemma3(tmp_path / "model")
    with caplog.at_level(logging.WARNING, "rlpack.models.policy_folder"):
        complete_policy_folder(folder, Model(path="some/model"), TOKENIZER, stop_token_ids=[])
    assert json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8")) == IMAGES
    (record,) = caplog.records
    missing = "processor_config.json, video_preprocessor_config.json could not be copied from some/model to the exp"
    assert record.getMessage().startswith(missing)


def test_a_base_model_that_is_gone_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = exported_gemma3(tmp_path / "model")
    complete_policy_folder(folder, Model(path=str(tmp_path / "gone")), TOKENIZER, stop_token_ids=[])
    assert sum("could not be copied" in record.getMessage() for record in caplog.records) == 1


def test_a_text_model_gets_no_processor(tmp_path: Path) -> None:
    folder, base = exported(tmp_path / "model"), tmp_path / "base"
    base.mkdir()
    (base / "preprocessor_config.json").write_text(json.dumps(IMAGES), encoding="utf-8")
    complete_policy_folder(folder, Model(path=str(base)), TOKENIZER, stop_token_ids=[])
    assert not (folder / "preprocessor_config.json").exists()
