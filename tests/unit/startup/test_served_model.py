"""What a path or a name of `rlpack serve` stands for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlpack.checkpoint.model_folder import new_model_folder
from rlpack.models.errors import ModelError
from rlpack.startup.served_model import ServedModel, find_served_model


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def refusal(given: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        find_served_model(str(given))
    return str(caught.value)


def test_a_folder_is_served_under_its_name_however_it_is_written(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "mine")
    expected = ServedModel("mine", str(folder), folder)
    assert find_served_model(str(folder)) == expected
    monkeypatch.chdir(folder)
    assert find_served_model(".") == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_served_model("~/mine/") == expected


def test_a_run_is_served_by_its_exported_model_under_the_runs_name(tmp_path):
    model = make_model(tmp_path / "run" / "model")
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert find_served_model(str(tmp_path / "run")) == ServedModel("run", str(model), model)


def test_folders_that_rlpack_exported_are_served(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    for name in ("model", "critic_model"):
        with new_model_folder(tmp_path / name) as staging:
            make_model(staging)
        assert find_served_model(str(tmp_path / name)) == ServedModel(name, str(tmp_path / name), tmp_path / name)
    model = tmp_path / "model"
    assert find_served_model(str(tmp_path)) == ServedModel(tmp_path.name, str(model), model)


def test_a_run_that_has_exported_nothing_says_when_it_will(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert "is a run without a model folder, which a run writes at its end; finish the run" in refusal(tmp_path)


def test_a_checkpoint_names_its_run(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "train" / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").touch()
    assert f"is a checkpoint, whose weights are in parts of ranks; give its run, {tmp_path / 'run'}," in refusal(
        checkpoint
    )


def test_a_name_that_is_no_path_is_the_hubs():
    assert find_served_model("Qwen/Qwen3-0.6B") == ServedModel("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None)


def test_a_missing_folder_is_refused_with_the_nearest(tmp_path):
    make_model(tmp_path / "model")
    message = refusal(tmp_path / "modle")
    assert f"is not a folder; did you mean {tmp_path / 'model'}?; give a model's folder, the directory of" in message


def test_adapters_alone_empty_folders_and_cut_weights_are_refused(tmp_path):
    assert "holds neither a model (config.json) nor a run (config.yaml); give a model's folder" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "has only adapters" in refusal(tmp_path)
    weights = make_model(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "damaged or truncated" in refusal(tmp_path)
