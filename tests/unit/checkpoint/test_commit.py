import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack import __version__
from rlpack.checkpoint import validity
from rlpack.checkpoint.commit import load_state, new_checkpoint, newest, newest_damage, prune
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.files import sha256_of
from rlpack.checkpoint.validity import FORMAT


def save(root: Path, step: int, *, keep: int = 2, content: bytes = b"weights") -> None:
    with new_checkpoint(root, step) as staging:
        (staging.path / "actor").mkdir()
        (staging.path / "actor" / "shard-0.bin").write_bytes(content + str(step).encode())
        staging.commit({"seed": 7}, keep=keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_committed_checkpoint_is_found_with_its_state_and_files(tmp_path: Path) -> None:
    save(tmp_path, 20)
    found = newest(tmp_path)
    assert found == tmp_path / "step-20"
    assert load_state(found) == {"seed": 7, "step": 20, "format": FORMAT, "rlpack": __version__}
    assert (found / "actor" / "shard-0.bin").read_bytes() == b"weights20"
    assert (tmp_path / "latest").read_text() == "step-20\n"


def test_the_manifest_holds_name_size_and_sha256_of_every_file(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path, 1) as staging:
        (staging.path / "a").write_bytes(b"abc")
        manifest = staging.commit({})
    files = {entry["name"]: entry for entry in manifest["files"]}
    assert set(files) == {"a", "state.json"}
    # SHA-256 of "abc": FIPS 180-2, appendix B.1.
    assert files["a"]["sha256"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files["a"]["size"] == 3


def test_no_directory_and_an_empty_one_hold_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None


def test_the_newest_step_counts_by_number_and_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path, step)
    assert newest(tmp_path) == tmp_path / "step-10"


def test_leaving_by_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail() -> None:
        with new_checkpoint(tmp_path, 2) as staging:
            (staging.path / "half").write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == ["latest", "step-1"]


KILLED_AT_EVERY_OPERATION = textwrap.dedent("""
    import json, os, signal, sys
    from pathlib import Path
    from rlpack.checkpoint.commit import load_state, new_checkpoint, newest
    from rlpack.checkpoint.validity import FORMAT

    CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}
    left = None  # file operations until the kill; None never kills

    def hook(event, arguments):
        global left
        changes = event in CHANGES or (event == "open" and isinstance(arguments[2], int))
        if left is None or not changes:
            return
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def save(root, step):
        with new_checkpoint(root, step) as staging:
            (staging.path / "shard").write_bytes(b"x" * 100)
            staging.commit({"marker": step}, keep=2)

    sys.addaudithook(hook)
    outcomes = []
    for operation in range(1000):
        root = Path(sys.argv[1]) / str(operation)
        for step in (1, 2, 3):
            save(root, step)
        child = os.fork()
        if child == 0:
            left = operation
            save(root, 4)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = newest(root)
        outcomes.append([found.name, load_state(found)["marker"], os.WIFSIGNALED(status)])
        save(root, 5)  # the next run's save works on whatever was left behind
        assert newest(root).name == "step-5"
        assert {p.name for p in root.iterdir()} <= {"latest", "step-3", "step-4", "step-5"}, list(root.iterdir())
        if status == 0:
            break
    print(json.dumps(outcomes))
""")


def test_a_kill_before_any_file_operation_of_a_save_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_AT_EVERY_OPERATION, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert ended.returncode == 0, ended.stderr
    outcomes = json.loads(ended.stdout)
    # A kill yields step 3 until step 4's marker is written, and step 4 from then on.
    steps = [int(name.removeprefix("step-")) for name, _, _ in outcomes]
    assert set(steps) == {3, 4}
    assert steps == sorted(steps)
    assert [marker for _, marker, _ in outcomes] == steps
    assert [killed for *_, killed in outcomes] == [True] * (len(outcomes) - 1) + [False]
    assert len(outcomes) > 12


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_changed_byte_makes_the_checkpoint_before_it_the_newest(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("flip")
    save(root, 1)
    save(root, 2)
    file = data.draw(st.sampled_from(["actor/shard-0.bin", "state.json", "manifest.json", "COMMITTED"]))
    path = root / "step-2" / file
    content = bytearray(path.read_bytes())
    # The marker's last byte is its newline, which says nothing.
    at = data.draw(st.integers(0, len(content) - 2))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(content))
    assert newest(root) == root / "step-1"


@pytest.mark.parametrize("file", ["actor/shard-0.bin", "state.json", "manifest.json", "COMMITTED"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_missing_or_cut_file_is_skipped_with_a_warning(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "step-2" / file
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])
    assert newest(tmp_path) == tmp_path / "step-1"
    assert "step-2 is skipped" in caplog.text


def test_a_damaged_state_is_never_returned(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-1" / "state.json").write_text('{"seed": 8}')
    with pytest.raises(CheckpointError, match=r"state\.json has"):
        load_state(tmp_path / "step-1")


def rewrite_manifest(folder: Path, **changes: object) -> None:
    """Change the manifest and its marker, as another version or an attacker would."""
    text = json.dumps(json.loads((folder / "manifest.json").read_text()) | changes)
    (folder / "manifest.json").write_text(text)
    (folder / "COMMITTED").write_text(hashlib.sha256(text.encode()).hexdigest())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"format": FORMAT + 1, "rlpack": "0.0.9", "files": {"in": "other words"}},
            rf"by rlpack 0\.0\.9 in format {FORMAT + 1}; this is",
        ),
        ({"format": 2, "rlpack": None}, "by rlpack an older version in format 2"),
        ({"rlpack": "99.10.1"}, r"by rlpack 99\.10\.1 in format 5"),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_by_its_version_and_not_skipped(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    rewrite_manifest(tmp_path / "step-2", **changes)
    with pytest.raises(CheckpointError, match=rf"step-2 was written {named}.*resume with the version that wrote it"):
        newest(tmp_path)
    assert not (tmp_path / "step-2" / "DAMAGED").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_a_manifest_that_names_a_file_outside_is_refused(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    files = json.loads((tmp_path / "step-1" / "manifest.json").read_text())["files"]
    rewrite_manifest(tmp_path / "step-1", files=[*files, {"name": name, "size": 0, "sha256": ""}])
    assert newest(tmp_path) is None
    assert "not a regular file inside" in caplog.text


def test_a_link_is_not_committed(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path, 1) as staging:
        (staging.path / "link").symlink_to("/etc/hostname")
        with pytest.raises(CheckpointError, match="not a regular file"):
            staging.commit({})
    assert newest(tmp_path) is None


def test_a_committed_step_is_not_overwritten_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="never overwritten"):
        save(tmp_path, 1)
    (tmp_path / "step-1" / "state.json").unlink()
    save(tmp_path, 1, content=b"again")
    assert newest(tmp_path) == tmp_path / "step-1"
    assert (tmp_path / "step-1" / "actor" / "shard-0.bin").read_bytes() == b"again1"
    assert names(tmp_path) == ["latest", "step-1"]


@pytest.mark.parametrize(("keep", "left"), [(1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_pruning_keeps_the_newest_and_never_less_than_two(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=keep)
    assert names(tmp_path) == ["latest", *(f"step-{step}" for step in left)]


def test_uncommitted_steps_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    (tmp_path / "step-2" / "COMMITTED").unlink()
    prune(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-1", "step-3"]


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=9)
    read = validity.read_text

    def stale(path: Path) -> str:
        if path.parent.name == "step-20":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(validity, "read_text", stale)
        prune(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-10", "step-20", "step-30"]
    prune(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-20", "step-30"]


def test_a_skipped_checkpoint_is_not_kept_instead_of_a_valid_one(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-2" / "state.json").write_text("{}")
    assert newest(tmp_path) == tmp_path / "step-1"
    save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-1", "step-3"]


def test_a_checkpoint_whose_files_are_restored_is_found_and_kept_again(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    state = tmp_path / "step-2" / "state.json"
    content = state.read_bytes()
    state.unlink()
    assert newest(tmp_path) == tmp_path / "step-1"
    state.write_bytes(content)
    assert newest(tmp_path) == tmp_path / "step-2"
    save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-2", "step-3"]


def test_damage_is_that_of_the_newest_committed_checkpoint_and_leftovers_are_none(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    assert newest_damage(tmp_path) is None
    (tmp_path / "step-3" / "COMMITTED").unlink()  # as a crash before the marker leaves it
    (tmp_path / "step-2" / "state.json").unlink()
    assert newest_damage(tmp_path) == (tmp_path / "step-2", "state.json is missing")
    assert newest_damage(tmp_path / "nowhere") is None


def test_a_delete_that_fails_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} is in use")

    monkeypatch.setattr("shutil.rmtree", refuse)
    save(tmp_path, 3)
    assert newest(tmp_path) == tmp_path / "step-3"
    assert "can be deleted by hand" in caplog.text


def test_too_little_free_space_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 9, content=b"x" * 5)
    save(tmp_path, 10, content=b"x" * 1000)
    size = sum(path.stat().st_size for path in (tmp_path / "step-10").rglob("*") if path.is_file())
    size -= sum((tmp_path / "step-10" / name).stat().st_size for name in ("manifest.json", "COMMITTED"))
    before = names(tmp_path)
    for free in (size - 1, size):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if free < size:
            with pytest.raises(CheckpointError, match=f"of {size:,} bytes, like the previous one, .* doesn't fit"):
                save(tmp_path, 11)
            assert names(tmp_path) == before
        else:
            save(tmp_path, 11)


def test_fewer_kept_checkpoints_are_advised_only_if_more_than_two_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step, keep=9)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(CheckpointError, match="kept until this one is complete") as two:
            save(tmp_path, 3)
    assert "checkpoint.keep" not in str(two.value)
    save(tmp_path, 3, keep=9)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match=r"free some space, lower checkpoint\.keep, or"):
        save(tmp_path, 4)


def disk_of(root: Path, checkpoints: float, size: int) -> Callable[[Path], SimpleNamespace]:
    """Return a stand-in for `disk_usage` on a disk with room for a number of checkpoints."""

    def usage(path: Path) -> SimpleNamespace:
        used = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
        return SimpleNamespace(free=int(checkpoints * size) - used)

    return usage


def test_what_a_killed_save_left_takes_no_space_from_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step, content=b"x" * 10_000)
    left = tmp_path / ".tmp-3-deadbeef"
    left.mkdir()
    (left / "weights").write_bytes(b"x" * 10_000)
    monkeypatch.setattr("shutil.disk_usage", disk_of(tmp_path, 3.5, 10_000))
    save(tmp_path, 3, content=b"x" * 10_000)
    assert names(tmp_path) == ["latest", "step-2", "step-3"]


def test_checkpoints_beyond_the_number_kept_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=9, content=b"x" * 10_000)
    monkeypatch.setattr("shutil.disk_usage", disk_of(tmp_path, 5.5, 10_000))
    with pytest.raises(CheckpointError, match=r"lower checkpoint\.keep"), new_checkpoint(tmp_path, 6, keep=9):
        pass
    with new_checkpoint(tmp_path, 6, keep=3):
        assert names(tmp_path)[-3:] == ["step-3", "step-4", "step-5"]


@pytest.mark.parametrize(
    ("file", "number"),
    [
        ("COMMITTED", errno.EIO),
        ("manifest.json", errno.ESHUTDOWN),
        ("state.json", errno.ENOTCONN),
        ("actor/shard-0.bin", errno.EHOSTDOWN),
        ("actor/shard-0.bin", errno.EREMOTEIO),
        ("actor/shard-0.bin", errno.EACCES),
    ],
)
def test_a_file_that_cannot_be_read_for_the_moment_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    failures = 1
    open_file = os.open

    def unsteady(path: Any, *arguments: Any) -> int:
        nonlocal failures
        if failures and Path(path) == tmp_path / "step-2" / file:
            failures -= 1
            raise OSError(number, os.strerror(number), str(path))
        return open_file(path, *arguments)

    monkeypatch.setattr("os.open", unsteady)
    monkeypatch.setattr(validity, "_PAUSE_S", 0.0)
    assert newest(tmp_path) == tmp_path / "step-2"
    failures = 2
    with pytest.raises(CheckpointError, match=rf"step-2 can't be read: .*{os.strerror(number)}.*; check the disk and"):
        newest(tmp_path)
    assert not (tmp_path / "step-2" / "DAMAGED").exists()
    assert newest(tmp_path) == tmp_path / "step-2"


def test_a_folder_that_cannot_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    stat = os.stat

    def refuse(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if Path(path).parent == tmp_path / "step-1":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr("os.stat", refuse)
    monkeypatch.setattr(validity, "_PAUSE_S", 0.0)
    for find in (newest, newest_damage):
        with pytest.raises(CheckpointError, match=r"step-1 can't be read: .*Permission denied"):
            find(tmp_path)
    assert not os.path.lexists(tmp_path / "step-1" / "DAMAGED")


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    save(tmp_path, 1)
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"can't be listed: .*Input/output error"):
        newest(tmp_path)


def test_a_full_disk_is_a_checkpoint_error_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 2)
    assert newest(tmp_path) == tmp_path / "step-1"


def test_all_files_and_directories_are_on_the_disk_before_the_rename_and_the_marker_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def seen_fsync(descriptor: int) -> None:
        events.append("fsync " + os.readlink(f"/proc/self/fd/{descriptor}").replace(str(tmp_path), ""))
        fsync(descriptor)

    def seen_rename(source: Path, target: Path) -> Path:
        events.append(f"rename to /{target.name}")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)

    def seen_replace(source: Path, target: Path) -> Path:
        events.append(f"rename to /{target.relative_to(tmp_path)}")
        return replace(source, target)

    monkeypatch.setattr(Path, "rename", seen_rename)
    monkeypatch.setattr(Path, "replace", seen_replace)
    save(tmp_path, 1)
    cut = events.index("rename to /step-1")
    before = {event.split("/", 2)[2] if event.count("/") > 1 else "" for event in events[:cut]}
    assert before == {"", "actor", "actor/shard-0.bin", "state.json", "manifest.json"}
    after = events[cut + 1 :]
    marker = ["fsync /step-1/.COMMITTED", "rename to /step-1/COMMITTED", "fsync /step-1"]
    assert after == ["fsync ", *marker, "fsync /.latest", "rename to /latest", "fsync "]


def test_a_disk_that_fills_up_at_the_marker_leaves_an_uncommitted_checkpoint_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("COMMITTED"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(tmp_path, 1)
    assert newest(tmp_path) is None
    assert newest_damage(tmp_path) is None
    save(tmp_path, 1)
    assert newest(tmp_path) == tmp_path / "step-1"


def test_the_state_holds_strict_json_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"), new_checkpoint(tmp_path, 1) as staging:
        staging.commit({"loss": float("nan")})
    assert newest(tmp_path) is None


def recommit(folder: Path) -> None:
    """Give a checkpoint's state, which was changed, hashes that fit it."""
    state, manifest = folder / "state.json", folder / "manifest.json"
    entry = {"name": "state.json", "size": state.stat().st_size, "sha256": sha256_of(state)}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": [entry]}))
    (folder / "COMMITTED").write_text(sha256_of(manifest))


@pytest.mark.parametrize(
    "content",
    [
        *(b"[]", b"NaN", b"null", b"\xef\xbb\xbf{}", b"\xff", b'{"step": 3}', b'{"step": ' + b"9" * 5000 + b"}"),
        *(b'{"a": ' + b"[" * levels + b"]" * levels + b"}" for levels in (100, 100_000)),
    ],
)
def test_a_state_with_fitting_hashes_that_is_no_state_is_skipped(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    (tmp_path / "step-4" / "state.json").write_bytes(content)
    recommit(tmp_path / "step-4")
    assert newest(tmp_path) == tmp_path / "step-2"
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_state(tmp_path / "step-4")


@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", "state.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "device"])
def test_a_checkpoint_with_a_file_that_is_none_is_skipped_without_reading_it(tmp_path: Path, name: str, make) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    (tmp_path / "step-4" / name).unlink()
    make(tmp_path / "step-4" / name)
    assert newest(tmp_path) == tmp_path / "step-2"
    prune(tmp_path, keep=2)
