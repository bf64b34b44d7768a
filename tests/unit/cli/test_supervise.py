"""Attempts of supervised runs; `tests/end_to_end/test_supervise.py` kills and continues real ones."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpack.cli.signals import termination_as_keyboard_interrupt
from rlpack.cli.supervise import begin_attempt, supervise
from rlpack.distributed import missing_nodes

# An attempt that writes the name of the first signal it receives, and ends as an interrupted run.
ATTEMPT = f"""#!{sys.executable}
import signal, sys
from pathlib import Path
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: (Path("received").write_text(signal.Signals(number).name), sys.exit(130)))
Path("ready").touch()
while True:
    signal.pause()
"""


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """Restore the handlers of signals that a command ignores once it was signalled."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# An attempt that ends at the second SIGTERM, as a run does.
STUBBORN = f"""#!{sys.executable}
import signal, sys
from pathlib import Path
counts = []
def count(number, frame):
    counts.append(number)
    Path(f"ready{{len(counts)}}").touch()
    if len(counts) == 2:
        sys.exit(130)
signal.signal(signal.SIGTERM, count)
Path("ready0").touch()
while True:
    signal.pause()
"""


def replace_attempt(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a script take the place of Python in the folder, which becomes the working directory."""
    attempt = folder / "attempt"
    attempt.write_text(script)
    attempt.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(attempt))


def test_the_second_sigterm_of_a_supervisor_reaches_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usual_handlers: None
):
    replace_attempt(tmp_path, monkeypatch, STUBBORN)

    def stop() -> None:
        for number in range(2):
            until = time.monotonic() + 60
            while not (tmp_path / f"ready{number}").exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.1)  # the supervisor goes back to waiting
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with termination_as_keyboard_interrupt():
        assert supervise([], "run", 3) == 130
    assert (tmp_path / "ready2").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_attempt_gets_the_signal_that_its_supervisor_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usual_handlers: None, number: signal.Signals
):
    # A run that a scheduler also sends SIGTERM to takes both for one, but a SIGINT for the request to end at once.
    replace_attempt(tmp_path, monkeypatch, ATTEMPT)

    def stop() -> None:
        until = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=stop, daemon=True).start()
    with termination_as_keyboard_interrupt():
        assert supervise([], "run", 3) == 130
    assert (tmp_path / "received").read_text() == number.name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_attempt_that_a_signal_kills_on_purpose_is_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    script = f"""#!{sys.executable}
import os, signal
signal.signal({number:d}, signal.SIG_DFL)
os.kill(os.getpid(), {number:d})
"""
    replace_attempt(tmp_path, monkeypatch, script)
    assert supervise([], "run", 3) == 130


def test_files_of_the_working_directory_replace_no_module_of_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "types.py").write_text("raise RuntimeError(__file__)\n")
    monkeypatch.chdir(tmp_path)
    assert supervise(["--cfg", "job"], "run", 0) == 0
    shown = capfd.readouterr()
    assert "supervise: 0" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("restarts", "ends"),
    [
        (3, "the run ended with exit code 1 twice without a new checkpoint; it is not restarted"),
        (1, "the run ended with exit code 1 after all supervise=1 restarts; it is not restarted"),
    ],
)
def test_causes_of_restarts_and_of_the_end_are_in_the_log_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, restarts: int, ends: str
):
    failing = f'#!{sys.executable}\nopen("run/run.log", "a").write("the attempt fails\\n")\nraise SystemExit(1)\n'
    replace_attempt(tmp_path, monkeypatch, failing)
    monkeypatch.setattr("rlpack.cli.supervise._PAUSE_S", 0.0)
    (tmp_path / "run").mkdir()
    assert supervise([], "run", restarts) == 1
    again = f"the run ended with exit code 1; restart 1 of {restarts} from the beginning in 0 s"
    first, cause, second, end = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert (first, second) == ("the attempt fails", "the attempt fails")
    assert cause.endswith(f" supervisor WARNING rlpack: {again}")
    assert end.endswith(f" supervisor ERROR rlpack: {ends}")
    assert [record.message for record in caplog.records] == [again, ends]


def test_a_run_that_ends_before_it_has_a_log_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace_attempt(tmp_path, monkeypatch, f"#!{sys.executable}\nraise SystemExit(1)\n")
    monkeypatch.setattr("rlpack.cli.supervise._PAUSE_S", 0.0)
    assert supervise([], "run", 1) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("refused", [2, 3])
def test_a_restart_that_is_refused_is_a_failure_of_a_run_that_could_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
):
    script = f"""#!{sys.executable}
import sys
from pathlib import Path
is_restarted = Path("attempts").exists()
Path("attempts").touch()
sys.exit({refused} if is_restarted else 1)
"""
    replace_attempt(tmp_path, monkeypatch, script)
    monkeypatch.setattr("rlpack.cli.supervise._PAUSE_S", 0.0)
    assert supervise([], "run", 2) == 1


@pytest.mark.parametrize(
    ("codes", "expected"),
    [("75 75 75 0", 0), ("75 75 75 75 0", 75), ("75 1 75 0", 0), ("75 1 0", 0), ("2 0", 2), ("3 0", 3), ("75 2 0", 2)],
)
def test_a_first_attempt_is_repeated_if_something_was_unavailable_and_not_if_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: str, expected: int
):
    script = f"""#!{sys.executable}
import sys
from pathlib import Path
with Path("attempts").open("a") as file:
    file.write("x")
sys.exit({[int(code) for code in codes.split()]}[Path("attempts").stat().st_size - 1])
"""
    replace_attempt(tmp_path, monkeypatch, script)
    monkeypatch.setattr("rlpack.cli.supervise._PAUSE_S", 0.0)
    assert supervise([], "run", 3) == expected
    assert attempts_of(tmp_path) == min(4, len(codes.split()) - (expected in (2, 3)))


def attempts_of(folder: Path) -> int:
    return len((folder / "attempts").read_text())


@pytest.mark.parametrize(("phase", "attempts"), [("reference", 2), ("sft_warmup", 4), ("train", 4)])
def test_only_checkpoints_that_a_run_continues_from_are_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, attempts: int
):
    monkeypatch.setattr("rlpack.cli.supervise._PAUSE_S", 0.0)
    script = f"""#!{sys.executable}
import sys
from pathlib import Path
with Path("attempts").open("a") as file:
    file.write("x")
folder = Path("run/checkpoints/{phase}") / f"step-{{Path('attempts').stat().st_size}}"
folder.mkdir(parents=True)
(folder / "COMMITTED").touch()
sys.exit(1)
"""
    replace_attempt(tmp_path, monkeypatch, script)
    assert supervise([], "run", 3) == 1
    # The first failure may come before any checkpoint could be written; a second one in a row ends the run.
    assert attempts_of(tmp_path) == attempts


def test_a_run_whose_standard_output_is_closed_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = f"""#!{sys.executable}
import sys
from pathlib import Path
with Path("attempts").open("a") as file:
    file.write("x")
sys.exit(141)
"""
    replace_attempt(tmp_path, monkeypatch, script)
    assert supervise([], "run", 3) == 141
    assert attempts_of(tmp_path) == 1


@pytest.mark.parametrize(("number", "waits"), [(1, False), (2, True)])
def test_attempts_after_the_first_wait_for_missing_nodes(monkeypatch: pytest.MonkeyPatch, number: int, waits: bool):
    monkeypatch.setattr(missing_nodes._Process, "is_restarted", False)
    monkeypatch.setattr(sys, "platform", "another")  # this process isn't tied to its parent
    monkeypatch.setenv("RLPACK_SUPERVISED_ATTEMPT", f"{os.getppid()}:{number}:3")
    begin_attempt()
    assert missing_nodes._Process.is_restarted == waits
