import string
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from rlpack.batch.store import LocalStore
from rlpack.checkpoint.commit import newest
from rlpack.config.schema import Config, Model, Trainer
from rlpack.data.tokenization import character_tokenizer
from rlpack.distributed.errors import RoleError
from rlpack.distributed.restarts import Restarts
from rlpack.installation import RAY_JOB
from rlpack.observe.errors import RunTakenOverError
from rlpack.observe.run_dir import CONFIG
from rlpack.observe.run_lock import lock_run_dir
from rlpack.packing import Batching
from rlpack.recipes.driver import open_session as opening
from rlpack.recipes.driver.open_session import _ending_checkpoint, open_session
from rlpack.recipes.driver.session import Session
from tests.builders import MODEL, tiny_config
from tests.unit.recipes.driver.sessions import DATA, AnsweringGroup, session_of, set_group
from tests.unit.recipes.driver.test_checkpoint_writer import Role


def fail_while_a_checkpoint_is_in_flight(
    session: Session, error: Exception | None, *, taken_over: bool, is_done: bool
) -> None:
    """Start a checkpoint, hand over the directory if `taken_over`, and raise the error that ends the run."""
    role = Role()
    set_group(session, "actor", start_save=role.start_save, save_is_done=lambda: is_done, finish_save=role.finish_save)
    with lock_run_dir(session.run.run_dir) as lock, _ending_checkpoint(session):
        cast(Any, session.run).check_lock = lock.check
        Session.save(session, in_background=True)
        if taken_over:
            (session.run.run_dir / "run.lock").write_text("another process", encoding="utf-8")
        session.checkpoints.advance()
        if error is not None:
            raise error
        session.run.check_lock()  # as before a step's metrics are logged


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("error", [None, RoleError("actor", 0, "train", "the rank died")])
def test_a_checkpoint_in_flight_is_not_committed_into_a_directory_that_was_taken_over(
    tmp_path: Path, error: Exception | None, is_done: bool
) -> None:
    session = session_of(tmp_path)
    with pytest.raises(RunTakenOverError if error is None else RoleError):
        fail_while_a_checkpoint_is_in_flight(session, error, taken_over=True, is_done=is_done)
    root = tmp_path / "checkpoints" / session.progress.phase
    assert not [path.name for path in root.iterdir() if not path.name.startswith(".tmp-0-") or not is_done]


def test_after_another_error_it_is_committed(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    with pytest.raises(RoleError):
        fail_while_a_checkpoint_is_in_flight(
            session, RoleError("actor", 0, "train", "the rank died"), taken_over=False, is_done=False
        )
    assert newest(tmp_path / "checkpoints" / session.progress.phase) is not None


@pytest.mark.parametrize("in_job", [False, True])
def test_ranks_get_absolute_paths_of_models_unless_in_a_job_and_the_run_stores_them_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_job: bool
) -> None:
    def start_roles(cluster: Any, config: Config, names: list[str], settings: Any, **_: Any) -> dict[str, Any]:
        of_ranks.append(settings[0])
        return {"actor": AnsweringGroup("actor", Batching(), {"export_model": None})}

    of_ranks: list[Config] = []
    cluster = SimpleNamespace(store=LocalStore(), restarts=Restarts(), ray_logs=None)
    monkeypatch.setattr(opening, "Cluster", lambda *_, **__: nullcontext(cluster))
    monkeypatch.setattr(opening, "start_roles", start_roles)
    monkeypatch.chdir(tmp_path)
    if in_job:
        monkeypatch.setenv(RAY_JOB, "{}")
    tokenizer = character_tokenizer(string.printable)
    settings = {name: value for name, value in MODEL.items() if name != "model_type"}
    model = AutoConfig.for_model("qwen2", **settings, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(model).save_pretrained("base")
    tokenizer.save_pretrained("base")
    config = tiny_config(
        data=DATA,
        model=Model(path="base", tokenizer="./base"),
        trainer=Trainer(prompts_per_step=4),
        run_dir=str(tmp_path / "run"),
    )
    with open_session(config) as session:
        assert session.config.model == config.model
    stored = yaml.safe_load((tmp_path / "run" / CONFIG).read_text())["model"]
    assert (stored["path"], stored["tokenizer"]) == ("base", "./base")
    expected = ("base", "./base") if in_job else (str(tmp_path / "base"),) * 2
    assert [(config.model.path, config.model.tokenizer) for config in of_ranks] == [expected]
