"""Files and folders that can't be read, written or named: one line that names them, and the exit code of each command.

Tests may run as root, whom no mode keeps from a file.
"""

import errno
from pathlib import Path
from typing import Any

import pytest

from rlpack.cli.main import main
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.sinks import JsonlSink
from rlpack.packing import Batching, make_plan

LONG = "x" * 300
ROWS = ("data=jsonl", "data.source=rows.jsonl", "data.validation_source=rows.jsonl", "model=tiny")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a run, a file of prompts and one of lengths."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    PlanRecord.of(make_plan([5, 6], Batching(max_tokens=16), dp_size=2)).write(Path("run/packing.json"))
    sink = JsonlSink(Path("run/metrics.jsonl"))
    sink.log(1, "train", {"reward/mean": 0.5})
    sink.close()
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "demonstration": "2"}\n')
    Path("lengths.jsonl").write_text("3\n4\n")
    return tmp_path


def forbid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have files of this name fail to open, as another user's do."""
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "name", "code", "place"),
    [
        (("plan", "lengths.jsonl"), "lengths.jsonl", 3, "lengths.jsonl"),
        (("simulate", "lengths.jsonl", "--async"), "lengths.jsonl", 3, "lengths.jsonl"),
        (("plan", "run", "--fit"), "metrics.jsonl", 3, "run/metrics.jsonl"),
        (("simulate", "run", "--async"), "metrics.jsonl", 3, "run/metrics.jsonl"),
        (("report", "run"), "metrics.jsonl", 2, "run/metrics.jsonl"),
        (("train", "--dry-run", "sft_warmup.steps=0", *ROWS), "rows.jsonl", 3, "rows.jsonl"),
    ],
)
def test_an_unreadable_file_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    name: str,
    code: int,
    place: str,
) -> None:
    forbid(monkeypatch, name)
    assert main(list(words)) == code
    assert only_line(capsys) == f"rlpack {words[0]}: {place} can't be read: Permission denied; make it readable"


@pytest.mark.parametrize("name", ["report.html", "packing.png"])
def test_a_report_that_cannot_be_written_is_one_line_that_names_the_file(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    Path("run", name).mkdir()
    assert main(["report", "run"]) == 2
    assert only_line(capsys) == (
        f"rlpack report: the report of run can't be written: run/{name}: Is a directory; change its permissions, or "
        "copy the run's directory"
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("plan", LONG), 3, "is neither a file nor a synthetic trace"),
        (("plan", f"{LONG}.jsonl"), 3, "there is no file"),
        (("simulate", LONG), 3, "is neither a file nor a synthetic trace"),
        (("simulate", LONG, "--async"), 3, "is neither a file nor a synthetic trace"),
        (("simulate", f"{LONG}.npy", "--async"), 3, "there is no file"),
        (("report", LONG), 2, "is not a directory"),
        (("trace", LONG), 2, "contains no spans/*.jsonl"),
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, message: str
) -> None:
    assert main(list(words)) == code
    assert message in only_line(capsys)
