from pathlib import Path
from typing import Any, cast

import pytest

from rlpack.checkpoint.commit import newest
from rlpack.distributed.errors import RoleError
from rlpack.observe.errors import RunTakenOverError
from rlpack.observe.run_lock import lock_run_dir
from rlpack.recipes.driver.open_session import _ending_checkpoint
from rlpack.recipes.driver.session import Session
from tests.unit.recipes.driver.sessions import session_of, set_group
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
