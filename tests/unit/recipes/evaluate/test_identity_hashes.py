"""What an evaluation that is continued is compared with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlpack.config.recipes import EVALUATE_TARGET, config_class
from rlpack.config.schema import Reward
from rlpack.recipes.evaluate import identity_hashes
from rlpack.recipes.evaluate.identity_hashes import code_hash, model_hash
from tests.builders import tiny_config


def test_a_reward_function_that_was_edited_has_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_rewards.py"
    module.write_text("def score(completion):\n    return 0.0\n")
    config = tiny_config(reward=Reward(function="edited_rewards:score"))
    before = code_hash(config)
    assert before == code_hash(config)
    module.write_text("def score(completion):\n    return 1.0\n")
    assert code_hash(config) != before


def test_a_scoring_role_that_was_edited_has_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_role.py"
    module.write_text("from rlpack.workers.reward import RewardWorker\n\n\nclass Mine(RewardWorker): ...\n")
    values = config_class(EVALUATE_TARGET)().model_dump(mode="json")
    values["roles"]["reward"]["target"] = "edited_role:Mine"
    config = config_class(EVALUATE_TARGET).model_validate(values)
    before = code_hash(config)
    module.write_text(module.read_text() + "\n    # scores in another way\n")
    assert code_hash(config) != before


def test_a_model_folder_has_another_hash_once_other_tokens_end_its_responses(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    values = config_class(EVALUATE_TARGET)().model_dump(mode="json") | {"model": {"path": str(tmp_path)}}
    config = config_class(EVALUATE_TARGET).model_validate(values)
    hashes = [model_hash(config)]
    for name in ("generation_config.json", "model.safetensors", "config.json"):
        (tmp_path / name).write_text('{"eos_token_id": [1, 5]}')
        hashes.append(model_hash(config))
    assert len(set(hashes)) == len(hashes)
    (tmp_path / "README.md").write_text("about the model")
    assert model_hash(config) == hashes[-1]


def test_a_model_of_the_hub_has_the_hash_of_its_commit(monkeypatch: pytest.MonkeyPatch):
    values = config_class(EVALUATE_TARGET)().model_dump(mode="json") | {"model": {"path": "owner/model"}}
    config, commit = config_class(EVALUATE_TARGET).model_validate(values), "0a1b"
    monkeypatch.setattr(identity_hashes, "load_config", lambda model: cast(Any, SimpleNamespace(_commit_hash=commit)))
    before = model_hash(config)
    assert model_hash(config) == before
    commit = "2c3d"
    assert model_hash(config) != before
