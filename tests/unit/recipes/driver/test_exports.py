import json
from pathlib import Path

import pytest

from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.schema import Rollout
from rlpack.recipes.driver.exports import export_models
from tests.file_sizes import no_larger_than
from tests.unit.recipes.driver.sessions import run_of, session_of, set_group


def write_model(folder: str) -> None:
    """Write what the tests need of an exported model."""
    Path(folder).mkdir()
    (Path(folder) / "generation_config.json").write_text('{"eos_token_id": 1}', encoding="utf-8")


def test_the_policys_folder_has_the_tokens_that_end_the_runs_responses(tmp_path: Path) -> None:
    session = session_of(tmp_path, recipe="ppo", rollout=Rollout(stop_token_ids=(5,)))
    for name in ("actor", "critic"):
        set_group(session, name, export_model=write_model)
    export_models(session)
    for folder, ids in (("model", [1, 5]), ("critic_model", 1)):
        found = json.loads((tmp_path / folder / "generation_config.json").read_text(encoding="utf-8"))
        assert found["eos_token_id"] == ids


def test_the_policys_folder_has_the_end_of_the_templates_turn(tmp_path: Path) -> None:
    session = session_of(tmp_path, recipe="sft")
    session.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
    data = session.config.data.model_copy(update={"chat_template": True})
    session.config = session.config.model_copy(update={"data": data})
    set_group(session, "actor", export_model=write_model)
    export_models(session)
    found = json.loads((tmp_path / "model" / "generation_config.json").read_text(encoding="utf-8"))
    assert found["eos_token_id"] == [1, 0]


def test_a_full_disk_while_the_model_is_written_says_how_to_write_it_later(tmp_path: Path) -> None:
    session = session_of(tmp_path, recipe="sft")
    set_group(session, "actor", export_model=write_model)
    text = rf"model could not be written to {tmp_path}/model: the tokenizer can't be written to .*File too large"
    with no_larger_than(1000), pytest.raises(CheckpointError, match=text):
        export_models(session)
    (note,) = run_of(session).notes
    assert note.endswith(f"the cause is fixed, write the models with run_dir={tmp_path} resume=auto")
    assert not (tmp_path / "model").exists()
