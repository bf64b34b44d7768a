"""The sandbox: what is hidden, what an older kernel can't enforce, and the removal of scratch directories."""

import ctypes
import fcntl
import os
import platform
import resource
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpack.rewards.pool import landlock, sandbox, seccomp
from rlpack.rewards.pool.hidden_paths import hidden_paths
from rlpack.rewards.pool.remove_tree import remove_tree
from rlpack.rewards.pool.sandbox import confine, unenforced

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="the sandbox needs Linux")
LIBC = ctypes.CDLL(None, use_errno=True)


def in_child(attempt: Callable[[], object]) -> str:
    """Return what an attempt in another process returns or raises, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(attempt())
        except BaseException as error:  # noqa: BLE001 - the top level of a process
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def confined(
    scratch: Path, attempt: Callable[[], object], *, strict: bool = False, hidden: tuple[Path, ...] = ()
) -> str:
    def run() -> object:
        confine(scratch, strict=strict, processes=False, hidden=hidden)
        return attempt()

    return in_child(run)


@pytest.mark.parametrize(
    ("version", "processes", "expected"),
    [
        (0, False, ["read credentials"]),
        (0, True, ["read credentials", "signal other processes"]),
        (1, False, ["truncate files"]),
        (3, False, []),
        (5, True, ["signal other processes (needs Landlock version 6, Linux 6.12, or reward.subprocesses=0)"]),
        (6, True, []),
    ],
)
def test_what_an_older_kernel_cannot_enforce_is_named(version, processes, expected):
    missing = unenforced(processes=processes, version=version)
    assert len(missing) == len(expected)
    assert all(text.startswith(begin) for text, begin in zip(missing, expected, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_without_landlock_strict_refuses_and_limits_confines_as_far_as_it_can(strict, tmp_path, monkeypatch):
    monkeypatch.setattr(landlock, "abi_version", lambda: 0)
    (tmp_path / "secret").write_text("x")
    answer = confined(tmp_path, lambda: os.kill(os.getppid(), 0), strict=strict, hidden=(tmp_path / "secret",))
    assert answer.startswith("SandboxError: reward functions could read credentials" if strict else "PermissionError")
    reason = sandbox.why_not_strict()
    assert reason is not None
    assert "needs Landlock, Linux 5.13" in reason


def own_socket() -> int:
    return socket.socketpair()[0].detach()


SIGNALS: dict[str, Callable[[int], object]] = {
    "kill": lambda pid: os.kill(pid, 0),
    "everyone": lambda pid: os.kill(-1, 0),
    "tgkill": lambda pid: LIBC.tgkill(pid, pid, 0),
    "sigqueue": lambda pid: LIBC.sigqueue(pid, 0, None),
    "pidfd": lambda pid: signal.pidfd_send_signal(os.pidfd_open(pid), 0),
    "owner": lambda pid: fcntl.fcntl(own_socket(), fcntl.F_SETOWN, pid),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_the_filter_alone_refuses_signals_to_other_processes(name):
    """For kernels whose Landlock can't; signals to the process itself stay possible."""
    parent = os.getpid()

    def attempt() -> str:
        sandbox._prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1)
        seccomp.filter_calls(strict=False, processes=False, signals=False)
        os.kill(os.getpid(), 0)
        signal.pthread_kill(threading.get_ident(), 0)
        ctypes.set_errno(0)
        result = SIGNALS[name](parent)
        return os.strerror(ctypes.get_errno()) if result == -1 else "sent"

    assert "Operation not permitted" in in_child(attempt)


def test_limits_of_the_process_itself_can_be_lowered(tmp_path):
    def lower() -> tuple[int, int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    assert confined(tmp_path, lower) == "(50, 50)"


def test_what_is_hidden_can_not_be_read_and_its_neighbors_can(tmp_path):
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    for path in (home / ".ssh" / "id", home / "data" / "rows", home / ".cache" / "huggingface" / "hub" / "model"):
        path.parent.mkdir(parents=True)
        path.write_text(path.name)
    scratch.mkdir()
    (home / "link").symlink_to(home / ".ssh" / "id")
    (home / "real").mkdir()
    (home / "real" / "netrc").write_text("secret")
    (home / ".netrc").symlink_to(home / "real" / "netrc")
    hidden = tuple(hidden_paths({"HOME": str(home)}))

    def read(path: Path) -> str:
        return confined(scratch, path.read_text, hidden=hidden).partition(":")[0]

    assert read(home / "data" / "rows") == "'rows'"
    assert read(home / ".cache" / "huggingface" / "hub" / "model") == "'model'"
    for name in (".ssh/id", "link", ".netrc", "real/netrc"):
        assert read(home / name) == "PermissionError"


@pytest.mark.parametrize("hidden", ["folder", "folder/inner", "."])
def test_modules_can_be_imported_from_a_hidden_directory_and_from_one_above_it(hidden, tmp_path, monkeypatch):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "folder" / "imported_here.py").write_text("x = 5")
    monkeypatch.syspath_prepend(tmp_path / "folder")

    def attempt() -> int:
        return __import__("imported_here").x

    assert confined(tmp_path / "scratch", attempt, hidden=(tmp_path / hidden,)) == "5"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("is_imported_from", [True, False])
def test_root_reads_closed_directories_of_others_only_to_import_from_them(is_imported_from, tmp_path, monkeypatch):
    folder, scratch = tmp_path / "home", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    (folder / "mine.py").write_text("x = 1")
    os.chown(folder, 65534, 65534)
    folder.chmod(0o700)
    if is_imported_from:
        monkeypatch.syspath_prepend(folder)
    answer = confined(scratch, (folder / "mine.py").read_text, hidden=(tmp_path / "secret",))
    assert answer.startswith("'x = 1'" if is_imported_from else "PermissionError")


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"HOME": "/h"}, "/h/.config"),
        ({"HOME": "/h"}, "/h/.cache/huggingface/token"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}, "/c"),
        ({"HF_HOME": "/hf"}, "/hf/token"),
        ({"HF_TOKEN_PATH": "/keys/hub"}, "/keys/hub"),
        ({"KUBECONFIG": "/a/one:/a/two"}, "/a/two"),
        ({"GOOGLE_APPLICATION_CREDENTIALS": "/keys/g.json"}, "/keys/g.json"),
        ({"RAY_AUTH_TOKEN_PATH": "/keys/ray"}, "/keys/ray"),
        ({"DOCKER_CONFIG": "/d"}, "/d"),
        ({}, "/etc/shadow"),
    ],
)
def test_credentials_are_hidden_wherever_the_environment_puts_them(environment, path):
    assert Path(path) in hidden_paths(environment)


def test_dotenv_files_of_the_working_directory_are_hidden(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not [path for path in hidden_paths({}) if path.is_relative_to(tmp_path)]
    (tmp_path / ".env.local").write_text("KEY=x")
    assert tmp_path / ".env.local" in hidden_paths({})


def test_other_paths_in_the_environment_are_not_hidden():
    environment = {"PATH": "/usr/bin", "TOKENIZER_PATH": "/models/tok", "HOME": "/h", "SECRET": "word", "API_KEY": "/"}
    assert not {Path(path) for path in ("/usr/bin", "/models/tok", "/h", "/")} & set(hidden_paths(environment))


def test_another_kind_of_machine_is_named(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    missing = unenforced(processes=True, version=6)
    assert missing == ["call any part of the kernel (the filter of system calls needs x86_64 or aarch64, not riscv64)"]


def test_a_tree_is_removed_whatever_its_modes_depth_and_names(tmp_path):
    top, outside = tmp_path / "top", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    top.mkdir()
    (top / "link").symlink_to(outside)
    (top / "file").write_text("x")
    (top / ("n" * 255)).mkdir()
    (top / "closed" / "inner").mkdir(parents=True)
    (top / "closed" / "inner" / "file").write_text("x")
    os.mkfifo(top / "closed" / "pipe")
    for path, mode in ((top / "closed" / "inner", 0), (top / "closed", 0o400)):
        path.chmod(mode)
    before = os.getcwd()
    os.chdir(top)
    for _ in range(1100):  # beyond Python's recursion limit and the longest path
        os.mkdir("deeper")
        os.chdir("deeper")
    os.chdir(before)
    remove_tree(top)
    assert not top.exists()
    assert (outside / "kept").read_text() == "x"
    remove_tree(top)  # nothing to do
