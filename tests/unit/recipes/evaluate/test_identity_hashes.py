"""What an evaluation that is continued is compared with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlpack.config.recipes import EVALUATE_TARGET, config_class
from rlpack.config.schema import Reward
from rlpack.recipes.evaluate import identity_hashes
from rlpack.recipes.evaluate.identity_hashes import model_hash, reward_hash
from tests.builders import tiny_config


def test_a_reward_function_that_was_edited_has_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_rewards.py"
    module.write_text("def score(completion):\n    return 0.0\n")
    config = tiny_config(reward=Reward(function="edited_rewards:score"))
    before = reward_hash(config)
    assert before == reward_hash(config)
    module.write_text("def score(completion):\n    return 1.0\n")
    assert reward_hash(config) != before


def test_a_model_of_the_hub_has_the_hash_of_its_commit(monkeypatch: pytest.MonkeyPatch):
    values = config_class(EVALUATE_TARGET)().model_dump(mode="json") | {"model": {"path": "owner/model"}}
    config, commit = config_class(EVALUATE_TARGET).model_validate(values), "0a1b"
    monkeypatch.setattr(identity_hashes, "load_config", lambda model: cast(Any, SimpleNamespace(_commit_hash=commit)))
    before = model_hash(config)
    assert model_hash(config) == before
    commit = "2c3d"
    assert model_hash(config) != before
