import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlpack.config.errors import ConfigError
from rlpack.config.schema import Config, Data, Model, Rollout
from rlpack.data.hub import NotOnHubError
from rlpack.models.errors import ModelError
from rlpack.startup.model_files import check_model_files, hub_models, weight_problems
from tests.builders import tiny_tokenizer

TENSORS = {"a": torch.zeros(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
NUM_TOKENS = len(tiny_tokenizer())


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with a tokenizer, and weights in two files."""
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": NUM_TOKENS}))
    names = {name: f"model-{number}-of-2.safetensors" for number, name in enumerate(TENSORS)}
    for name, file in names.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return tmp_path


def check(folder: Path, **sections: Any) -> None:
    values: dict[str, Any] = {"model": Model(path=str(folder))} | sections
    check_model_files(Config(**values))


def refusal(folder: Path, **sections: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check(folder, **sections)
    return str(caught.value)


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_whole_folder_passes_in_one_file_or_several(folder):
    check(folder)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    check(folder)


@pytest.mark.parametrize("size", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_named(folder, size):
    path = folder / "model-1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    message = refusal(folder)
    assert message.startswith(f"model.path is '{folder}': ")
    assert path.name in message


def test_bytes_after_the_last_tensor_are_damage(folder):
    path = folder / "model-1-of-2.safetensors"
    path.write_bytes(path.read_bytes() + b"0")
    assert f"{path.name} has {path.stat().st_size:,} bytes, but its header describes" in refusal(folder)


def test_a_missing_file_or_tensor_of_the_index_is_named(folder):
    save_file({"c": TENSORS["a"]}, folder / "model-0-of-2.safetensors")
    assert "model-0-of-2.safetensors lacks a" in refusal(folder)
    (folder / "model-0-of-2.safetensors").unlink()
    assert "model-0-of-2.safetensors, which model.safetensors.index.json names, is missing" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "model.safetensors.index.json can't be read" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "there is no model.safetensors and no model.safetensors.index.json in it" in refusal(folder)
    (folder / "config.json").unlink()
    assert "there is no config.json in it" in refusal(folder)


@pytest.fixture
def saved_again(folder) -> Path:
    """Return a folder as transformers leaves it where it saves a model first in several files, then in one."""
    for path in folder.glob("model-*"):
        path.unlink()
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def test_one_file_is_read_before_the_index_of_several(saved_again):
    check(saved_again)
    weights = saved_again / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors has" in refusal(saved_again)


def test_a_damaged_file_is_refused_although_the_index_names_whole_ones(folder):
    (folder / "model.safetensors").write_bytes(b"1234567")
    assert "model.safetensors has 7 bytes, fewer than its header says" in refusal(folder)


def test_an_index_that_only_vllm_reads_is_checked_where_vllm_loads_the_model(saved_again):
    expected = "names, is missing (if model.safetensors holds all weights, delete the index)"
    assert expected in refusal(saved_again, rollout=Rollout(engine="vllm"))
    assert any(expected in problem for problem in weight_problems(saved_again))  # of `rlpack serve`
    (saved_again / "model.safetensors.index.json").unlink()
    check(saved_again, rollout=Rollout(engine="vllm"))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder):
    change(folder / "config.json", vocab_size=NUM_TOKENS - 1)
    expected = f"whose tokenizer has {NUM_TOKENS} tokens, but the model has {NUM_TOKENS - 1}"
    assert expected in refusal(folder)
    change(folder / "config.json", vocab_size=None, text_config={"vocab_size": NUM_TOKENS - 1})
    assert expected in refusal(folder)


def test_a_tokenizer_without_an_end_needs_ids_that_end_a_response(folder):
    change(folder / "tokenizer_config.json", eos_token=None)
    assert "has no end-of-sequence token (eos_token)" in refusal(folder)
    check(folder, rollout=Rollout(stop_token_ids=(1,)))
    with pytest.raises(
        ConfigError, match=rf"rollout.stop_token_ids holds {NUM_TOKENS}, but the model's ids are from 0"
    ):
        check(folder, rollout=Rollout(stop_token_ids=(1, NUM_TOKENS)))


def test_other_ends_of_a_response_replace_the_tokenizers(folder):
    change(folder / "tokenizer_config.json", eos_token=None)
    refused = refusal(folder)
    assert "eos_token_id in the generation_config.json of model.path" in refused
    assert "data.chat_template=true" in refused
    check(folder, data=Data(chat_template=True))
    for ends, passes in ((None, False), (0, True), ([1, 2], True)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        check(folder) if passes else refusal(folder)
    (folder / "generation_config.json").write_text("[")
    assert "in which a JSON file can't be read" in refusal(folder)


def test_the_nearest_folder_is_offered(folder):
    (folder.parent / "my-model").mkdir()
    (folder.parent / "my-model.jsonl").touch()
    message = refusal(folder.parent / "my-modell")
    assert f"which is not a folder; did you mean {folder.parent / 'my-model'}?; set a folder, or a hub name" in message


def test_the_home_of_a_user_who_does_not_exist_is_no_folder():
    assert refusal(Path("~nobody-here/model")).startswith("model.path is '~nobody-here/model', which is not a folder")


@pytest.mark.parametrize(
    ("tokenizer", "own", "revisions"),
    [
        (None, None, {("a/model", "abc")}),
        ("a/model", None, {("a/model", "abc")}),
        ("a/tokenizer", None, {("a/model", "abc"), ("a/tokenizer", None)}),
        ("a/tokenizer", "def", {("a/model", "abc"), ("a/tokenizer", "def")}),
    ],
)
def test_the_revision_of_a_model_is_not_that_of_another_tokenizer(tokenizer, own, revisions):
    model = Model(path="a/model", tokenizer=tokenizer, revision="abc", tokenizer_revision=own)
    assert {(one.name, one.revision) for one in hub_models(Config(model=model))} == revisions


def test_a_model_that_neither_the_hub_nor_its_cache_has_is_refused(monkeypatch):
    def check_name(**sections: Any) -> None:
        check_model_files(Config(model=Model(path="some/thing"), **sections))

    monkeypatch.setattr("rlpack.models.hub_models.hub_problem", lambda *_: "it answered 404")
    with pytest.raises(
        ModelError, match=r"model.path is 'some/thing': .* asked for it \(it answered 404\), and its cache"
    ):
        check_name()

    def absent(*_):
        raise NotOnHubError

    monkeypatch.setattr("rlpack.models.hub_models.hub_problem", absent)
    with pytest.raises(ModelError, match=r"the hub has no such model, or you have no access \(revision main\); check"):
        check_name()
    monkeypatch.setattr("rlpack.models.hub_models.hub_problem", lambda *_: "")
    check_name()


def test_a_model_in_the_cache_is_no_tokenizer(monkeypatch):
    monkeypatch.setattr("rlpack.models.hub_models.hub_problem", lambda *_: "no answer in 6 s")
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file, revision: file if file == "config.json" else None
    )
    check_model_files(Config(model=Model(path="some/thing")))
    with pytest.raises(ModelError, match=r"model.tokenizer is 'other/thing': .*its cache has no such model"):
        check_model_files(Config(model=Model(path="some/thing", tokenizer="other/thing")))


def test_a_runs_directory_is_told_from_the_model_in_it(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    (run / "config.yaml").write_text("seed: 1")
    (run / "metrics.jsonl").write_text("")
    assert refusal(run).endswith(
        "which is a run's directory without a model folder, which a run writes at its end: "
        "finish the run with resume=auto"
    )
    folder.rename(run / "model")
    assert refusal(run) == f"model.path is '{run}', which is a run's directory; did you mean {run / 'model'}?"
    assert refusal(run, model=Model(tokenizer=str(run))).startswith("model.tokenizer is")
    check(run / "model")
