"""Checkpoints that are written while steps go on."""

import gc
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from rlpack.checkpoint.commit import Staging, load_state, newest
from rlpack.checkpoint.errors import CheckpointError
from rlpack.distributed.errors import RoleError
from rlpack.observe.errors import RunTakenOverError
from rlpack.packing import Batching
from rlpack.recipes.driver.checkpoint_writer import CheckpointWriter
from tests.unit.recipes.driver.sessions import AnsweringGroup


class Role:
    """A role that writes one file, when it is told to."""

    def __init__(self) -> None:
        self.folder = Path()
        self.failure: Exception | None = None
        self.is_done = False
        self.is_saving = False
        self.writes = 0
        self.deadline_s = 0.0

    def group(self, name: str) -> Any:
        methods = ("save", "start_save", "save_is_done", "finish_save")
        answers = {method: getattr(self, method) for method in methods}
        return cast(Any, AnsweringGroup(name, Batching(), answers))

    def save(self, folder: str) -> None:
        self.start_save(folder, 1.0)
        self.finish_save(1.0)

    def start_save(self, folder: str, timeout_s: float) -> None:
        assert not self.is_saving, "as ranks require"
        self.folder, self.is_done, self.is_saving = Path(folder), False, True

    def save_is_done(self) -> bool:
        return self.is_done

    def finish_save(self, timeout_s: float) -> None:
        self.deadline_s = timeout_s
        if not self.is_saving:  # as ranks do
            return
        self.is_saving = False
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        self.writes += 1
        (self.folder / "weights").write_text(str(self.writes))


def written(writer: CheckpointWriter, root: Path, role: Role, step: int, *, background: bool = True) -> None:
    start = writer.start if background else writer.save
    start(root, step, {"actor": role.group("actor")}, {"of": step})


def test_a_checkpoint_is_committed_once_all_have_written_with_the_state_of_its_step(tmp_path: Path):
    writer, role = CheckpointWriter(keep=2, timeout_s=30), Role()
    written(writer, tmp_path, role, 1, background=False)
    written(writer, tmp_path, role, 2)
    for _ in range(3):
        writer.advance()
    assert newest(tmp_path) == tmp_path / "step-1"
    role.is_done = True
    writer.advance()
    writer.finish()
    assert newest(tmp_path) == tmp_path / "step-2"
    assert load_state(tmp_path / "step-2")["of"] == 2
    writer.advance()
    writer.finish()


@pytest.mark.parametrize("background", [True, False])
def test_every_role_writes_into_an_empty_folder_of_its_name(tmp_path: Path, background: bool):
    class Listing(Role):
        """Lists the folder that it is given, as each of its ranks may."""

        def start_save(self, folder: str, timeout_s: float) -> None:
            super().start_save(folder, timeout_s)
            assert list(self.folder.iterdir()) == []

    writer, role = CheckpointWriter(keep=2, timeout_s=30), Listing()
    written(writer, tmp_path, role, 1, background=background)
    writer.finish()
    assert (tmp_path / "step-1" / "actor" / "weights").is_file()


def test_the_next_checkpoint_waits_for_the_one_in_flight(tmp_path: Path):
    writer, role = CheckpointWriter(keep=5, timeout_s=30), Role()
    for step in (1, 2):
        written(writer, tmp_path, role, step)
    assert newest(tmp_path) == tmp_path / "step-1"
    written(writer, tmp_path, role, 3, background=False)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize("end", ["advance", "finish", "start"])
def test_a_failed_save_is_raised_once_and_never_committed(tmp_path: Path, end: str):
    writer, role = CheckpointWriter(keep=2, timeout_s=30), Role()
    written(writer, tmp_path, role, 1, background=False)
    written(writer, tmp_path, role, 2)
    role.failure, role.is_done = CheckpointError("disk full"), True
    ends = {"advance": writer.advance, "finish": writer.finish, "start": lambda: written(writer, tmp_path, role, 3)}
    with pytest.raises(CheckpointError, match="disk full"):
        ends[end]()
    writer.advance()
    writer.finish()
    assert newest(tmp_path) == tmp_path / "step-1"
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("fails", ["start of the second role", "the driver's files", "end of the first role"])
def test_a_checkpoint_of_two_roles_that_failed_can_be_written_again(tmp_path: Path, fails: str):
    writer, actor, critic = CheckpointWriter(keep=2, timeout_s=30), Role(), Role()
    groups = {"actor": actor.group("actor"), "critic": critic.group("critic")}
    disk_full = CheckpointError("disk full")

    def refuse(*_: object) -> None:
        raise disk_full

    broken = AnsweringGroup("critic", Batching(), {"start_save": refuse, "finish_save": critic.finish_save})
    actor.failure = disk_full if fails == "end of the first role" else None

    def write() -> None:
        started = groups | ({"critic": cast(Any, broken)} if fails == "start of the second role" else {})
        writer.start(tmp_path, 1, started, {}, refuse if fails == "the driver's files" else None)
        writer.finish()

    with pytest.raises(CheckpointError, match="disk full"):
        write()
    writer.start(tmp_path, 1, groups, {})
    writer.finish()
    assert newest(tmp_path) == tmp_path / "step-1"


def test_an_abandoned_checkpoint_leaves_the_one_before_it(tmp_path: Path):
    writer, role = CheckpointWriter(keep=2, timeout_s=30), Role()
    written(writer, tmp_path, role, 1, background=False)
    written(writer, tmp_path, role, 2)
    assert newest(tmp_path) == tmp_path / "step-1"  # as after a kill
    writer.abandon()
    assert not list(tmp_path.glob(".tmp-*"))
    assert newest(tmp_path) == tmp_path / "step-1"


def test_after_an_error_the_checkpoint_in_flight_is_committed(tmp_path: Path):
    writer, role = CheckpointWriter(keep=2, timeout_s=30), Role()
    written(writer, tmp_path, role, 1)
    writer.finish_after_error()
    assert newest(tmp_path) == tmp_path / "step-1"
    writer.abandon()
    assert newest(tmp_path) == tmp_path / "step-1"


def test_after_an_error_of_its_roles_the_checkpoint_in_flight_is_deleted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    writer, role = CheckpointWriter(keep=2, timeout_s=30), Role()
    written(writer, tmp_path, role, 1, background=False)
    written(writer, tmp_path, role, 2)
    role.failure = RoleError("actor", 0, "finish_save", "the rank died")
    writer.finish_after_error()
    assert newest(tmp_path) == tmp_path / "step-1"
    assert not list(tmp_path.glob(".tmp-*"))
    assert "could not be committed: " in caplog.text
    assert "the rank died" in caplog.text


@pytest.mark.parametrize("ends", [True, False])
def test_a_commit_under_way_is_waited_for_and_its_folder_never_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
):
    has_started, may_go_on, commit = threading.Event(), threading.Event(), Staging.commit

    def held(staging: Staging, *arguments: Any, **options: Any) -> Any:
        has_started.set()
        assert may_go_on.wait(30.0)
        return commit(staging, *arguments, **options)

    writer, role = CheckpointWriter(keep=2, timeout_s=30 if ends else 0.1), Role()
    monkeypatch.setattr(Staging, "commit", held)
    written(writer, tmp_path, role, 1)
    role.is_done = True
    writer.advance()
    assert has_started.wait(30.0)
    if ends:
        threading.Timer(0.2, may_go_on.set).start()
    writer.abandon()
    if not ends:
        assert "was not committed in 0 s" in caplog.text
        assert len(list(tmp_path.glob(".tmp-1-*/actor/weights"))) == 1
        may_go_on.set()
        until = time.monotonic() + 30.0
        while newest(tmp_path) is None and time.monotonic() < until:
            time.sleep(0.01)
    assert newest(tmp_path) == tmp_path / "step-1"


class Directory:
    """A run directory that another process takes over."""

    def __init__(self) -> None:
        self.is_taken_over = False

    def check(self) -> None:
        if self.is_taken_over:
            raise RunTakenOverError("another process has it")


@pytest.mark.parametrize("background", [True, False])
def test_a_directory_that_was_taken_over_is_left_to_the_other_process(tmp_path: Path, background: bool):
    directory, role = Directory(), Role()
    writer = CheckpointWriter(keep=2, timeout_s=30, check=directory.check)
    written(writer, tmp_path, role, 1)
    directory.is_taken_over = True
    with pytest.raises(RunTakenOverError):
        writer.finish()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".tmp-2-other").mkdir()
    with pytest.raises(RunTakenOverError):
        written(writer, tmp_path, role, 2, background=background)
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-2-other"]


def test_a_commit_under_way_in_a_directory_that_was_taken_over_is_neither_waited_for_nor_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory, role, may_go_on, has_ended = Directory(), Role(), threading.Event(), threading.Event()
    commit = Staging.commit

    def held(staging: Staging, *arguments: Any, **options: Any) -> Any:
        assert may_go_on.wait(30.0)
        try:
            return commit(staging, *arguments, **options)
        finally:
            has_ended.set()

    monkeypatch.setattr(Staging, "commit", held)
    writer = CheckpointWriter(keep=2, timeout_s=30, check=directory.check)
    written(writer, tmp_path, role, 1)
    role.is_done = True
    writer.advance()
    directory.is_taken_over = True
    writer.discard()
    writer.abandon()
    gc.collect()
    assert len(list(tmp_path.glob(".tmp-1-*/actor/weights"))) == 1
    may_go_on.set()
    assert has_ended.wait(30.0)
    assert not list(tmp_path.glob("step-*"))


def test_ranks_give_up_on_their_files_before_the_driver_gives_up_on_them(tmp_path: Path):
    # Otherwise the error would be that of a call without an answer, and not name the folder.
    writer, role = CheckpointWriter(keep=2, timeout_s=30), Role()
    written(writer, tmp_path, role, 1)
    writer.finish()
    assert 20 < role.deadline_s < 30
