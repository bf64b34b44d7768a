"""Spans: what they record, across threads, errors and full files."""

import json
import threading
import time
from pathlib import Path

from rlpack.spans import SpanFile, record_values, recorded_spans, span


def lines(folder: Path) -> list[list[object]]:
    """Return the spans in the only file of a folder."""
    (path,) = folder.glob("*.jsonl")
    head, *rest = path.read_text().splitlines()
    assert json.loads(head)["process"] == "main/0"
    return [json.loads(line) for line in rest]


def test_spans_nest_and_have_their_wall_clock_times(tmp_path: Path):
    began = time.time()
    with recorded_spans(tmp_path / "spans", "main/0"), span("step"):
        time.sleep(0.02)
        with span("update"):
            time.sleep(0.01)
    inner, outer = lines(tmp_path / "spans")
    assert [inner[0], outer[0]] == ["update", "step"]
    assert began * 1e6 - 1e3 <= outer[1] <= inner[1] - 20_000 <= time.time() * 1e6
    assert 10_000 <= inner[2] <= outer[2] - 20_000


def test_each_thread_has_its_own_nesting_and_name(tmp_path: Path):
    def work() -> None:
        with span("score"):
            pass

    with recorded_spans(tmp_path / "spans", "main/0"), span("step"):
        thread = threading.Thread(target=work, name="background-reward")
        thread.start()
        thread.join(10.0)
        assert [line[::3] for line in lines(tmp_path / "spans")] == [["score", "background-reward"]]
    assert [line[::3] for line in lines(tmp_path / "spans")][1:] == [["step", "MainThread"]]


def test_values_are_recorded_with_the_time_for_which_they_held(tmp_path: Path):
    record_values("engine", 0, 1, {"lost": 1})
    with recorded_spans(tmp_path / "spans", "main/0"):
        record_values("engine", 5_000, 7_500, {"running": 2.5})
    assert lines(tmp_path / "spans") == [["engine", 5_000, 2_500, {"running": 2.5}]]


def test_what_fails_is_recorded_too(tmp_path: Path):
    with recorded_spans(tmp_path / "spans", "main/0"):
        try:
            with span("update"):
                raise ValueError
        except ValueError:
            pass
        with span("next"):
            pass
    assert [line[0] for line in lines(tmp_path / "spans")] == ["update", "next"]


def test_outside_of_a_run_nothing_is_written(tmp_path: Path):
    with recorded_spans(tmp_path / "spans", "main/0"):
        pass
    with span("update"):
        pass
    assert lines(tmp_path / "spans") == []


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog):
    (tmp_path / "spans").write_text("a file")
    with recorded_spans(tmp_path / "spans", "main/0"), span("update"):
        pass
    assert "main/0 records no spans: " in caplog.text


def test_a_long_run_keeps_its_newest_spans_within_two_files(tmp_path: Path):
    file = SpanFile(tmp_path, "main/0", most_bytes=2000)
    for number in range(300):
        file.write([(f"step {number}", number, 1)])
    file.close()
    paths = sorted(tmp_path.iterdir(), key=lambda path: path.name.endswith(".old.jsonl"))
    assert len(paths) == 2
    assert all(path.stat().st_size < 2100 for path in paths)
    kept = [json.loads(line)[1] for path in reversed(paths) for line in path.read_text().splitlines()[1:]]
    assert kept == list(range(kept[0], 300))
    assert len(kept) > 40


def test_a_file_that_cannot_be_replaced_is_not_written_to_under_its_old_number(tmp_path: Path):
    file = SpanFile(tmp_path / "spans", "main/0", most_bytes=200)
    file.path.unlink()
    file.path.parent.rmdir()
    for number in range(5):
        file.write([(f"step {number}", number, 1)])
    with (tmp_path / "other").open("wb", buffering=0) as other:  # gets the number that is free now
        for number in range(5):
            file.write([(f"late {number}", number, 1)])
        other.write(b"its own")
    assert (tmp_path / "other").read_bytes() == b"its own"
    file.close()


def test_a_closed_file_is_not_written_to_under_its_old_number(tmp_path: Path):
    file = SpanFile(tmp_path / "spans", "main/0")
    file.close()
    with (tmp_path / "other").open("wb") as other:  # gets the number that is free now
        file.write([("late", 0, 1)])
        assert other.fileno() > 0
    assert (tmp_path / "other").read_bytes() == b""
    assert lines(tmp_path / "spans") == []


def test_no_span_file_is_written_where_the_run_directory_does_not_exist(tmp_path: Path, caplog):
    with recorded_spans(tmp_path / "run" / "spans", "engines/0"), span("update"):
        pass
    assert "engines/0 records no spans: " in caplog.text
    assert list(tmp_path.iterdir()) == []
