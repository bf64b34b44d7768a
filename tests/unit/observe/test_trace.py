"""The trace of a run, from files as processes leave them."""

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import Collection

from rlpack.cli.main import main
from rlpack.observe.errors import ReportError
from rlpack.observe.report.engine_panel import EnginePanel, engine_figure
from rlpack.observe.report.timeline import Timeline, timeline_figure
from rlpack.observe.trace import ProcessSpans, Span, idle_spans, read_spans, train_steps, write_trace
from tests.file_sizes import no_larger_than

MS = 1000
DRIVER = [["train step 1", 0, 100 * MS, "MainThread"], ["train step 2", 100 * MS, 100 * MS, "MainThread"]]
TRAINER = [
    ["forward", 10 * MS, 20 * MS, "MainThread"],
    ["actor.train_step", 10 * MS, 60 * MS, "MainThread"],
    ["reward.score", 30 * MS, 10 * MS, "background-reward"],
    ["actor.train_step", 110 * MS, 40 * MS, "MainThread"],
]
WINDOWS = [
    ["engine", 50 * MS, 10 * MS, {"running": 3.0, "waiting": 1.0, "cache": 0.5, "tokens": 20}],
    ["engine", 60 * MS, 20 * MS, {"running": 1.0, "waiting": 0.0, "cache": 0.25, "tokens": 10}],
    ["engine", 120 * MS, 10 * MS, {"running": 2.0, "waiting": 0.0, "cache": 0.25, "tokens": 10}],
]
ENGINE = [["rollout.generate", 50 * MS, 40 * MS, "MainThread"], ["rollout.load_bucket", 195 * MS, 5 * MS, "MainThread"]]


def write(run_dir: Path, name: str, process: str, spans: list[list[object]], tail: str = "") -> None:
    (run_dir / "spans").mkdir(exist_ok=True)
    head = {"process": process, "pid": 7, "host": "node"}
    text = "".join(json.dumps(line) + "\n" for line in [head, *spans])
    (run_dir / "spans" / f"{name}.jsonl").write_text(text + tail)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write(tmp_path, "a", "main/0", TRAINER)
    write(tmp_path, "b", "engines/0", ENGINE)
    write(tmp_path, "c", "driver", DRIVER)
    return tmp_path


def test_the_driver_comes_first_and_spans_are_in_order(run_dir: Path):
    processes = read_spans(run_dir)
    assert [one.process for one in processes] == ["driver", "engines/0", "main/0"]
    # The outer span of two that begin together comes first, which viewers need to nest them.
    assert [span.name for span in processes[2].spans[:2]] == ["actor.train_step", "forward"]
    assert [span.name for span in processes[2].outermost("MainThread")] == ["actor.train_step", "actor.train_step"]


def test_a_line_that_a_killed_process_left_unfinished_is_counted(run_dir: Path):
    write(run_dir, "a", "main/0", TRAINER, tail='["actor.tra')
    assert [(one.unreadable, len(one.spans)) for one in read_spans(run_dir)] == [(0, 2), (0, 2), (1, 4)]


def test_the_end_of_a_long_file_can_be_read_alone(run_dir: Path):
    long = [["forward", number * MS, MS, "MainThread"] for number in range(1000)]
    write(run_dir, "a", "main/0", long)
    spans = read_spans(run_dir, last_bytes=1000)[2].spans
    assert 10 < len(spans) < 40
    assert [list(span) for span in spans] == long[-len(spans) :]


def test_the_older_file_of_a_process_belongs_to_it(run_dir: Path):
    write(run_dir, "a.old", "main/0", [["actor.save", 0, MS, "MainThread"]])
    processes = read_spans(run_dir)
    assert len(processes) == 3
    assert [span.name for span in processes[2].spans][:2] == ["actor.save", "actor.train_step"]


def test_idle_is_what_lies_between_calls_within_the_steps(run_dir: Path):
    processes = read_spans(run_dir)
    steps = train_steps(processes)
    found = [(span.begin_us // MS, span.end_us // MS) for span in idle_spans(processes[2], steps)]
    assert found == [(0, 10), (70, 100), (100, 110), (150, 200)]
    found = [(span.begin_us // MS, span.end_us // MS) for span in idle_spans(processes[1], steps)]
    assert found == [(0, 50), (90, 100), (100, 195)]


def test_idle_times_of_10_000_steps_are_found_in_linear_time():
    # Each step has five calls of 1 ms, 2 ms apart; the first one begins in the step before.
    number, length = 10_000, 15 * MS
    steps = [Span("train step", place * length, length, "MainThread") for place in range(number)]
    begins = [place * length + call * 3 * MS - MS // 2 for place in range(number) for call in range(5)]
    calls = tuple(Span("actor.train_step", begin, MS, "MainThread") for begin in begins)
    began = time.perf_counter()
    found = idle_spans(ProcessSpans("main/0", 7, "node", calls), steps)
    assert time.perf_counter() - began < 10.0  # a scan of all calls for each step takes minutes
    nexts = [*begins[1:], number * length]
    assert [(span.begin_us, span.end_us) for span in found] == [
        (begin + MS, following) for begin, following in zip(begins, nexts, strict=True)
    ]


def test_the_file_has_every_span_once_with_process_and_thread_names(run_dir: Path):
    write_trace(run_dir, run_dir / "trace.json")
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = [e for e in events if e["ph"] == "X" and e["name"] != "idle"]
    assert processes[3] == "main/0, process 7 on node"
    expected = {"driver": DRIVER, "engines/0": ENGINE, "main/0": TRAINER}
    for number, label in processes.items():
        own = [[e["name"], e["ts"], e["dur"], names[e["pid"], e["tid"]]] for e in spans if e["pid"] == number]
        assert sorted(own) == sorted(expected[label.partition(",")[0]])


def test_spans_of_threads_with_one_name_are_on_tracks_where_none_overlap_without_nesting(run_dir: Path):
    """As those of batches that are drawn at the same time are; Perfetto drops spans that overlap otherwise."""
    random = np.random.default_rng(0)
    lines: list[list[object]] = []
    for thread in range(3):
        begin = 0
        for number in range(50):
            begin, length = begin + int(random.integers(1, 90)), int(random.integers(10, 200))
            lines += [[f"draw {thread}.{number}", begin, length, "draw"], [f"part {thread}.{number}", begin, 5, "draw"]]
            begin += length
    write(run_dir, "c", "driver", [*DRIVER, *lines])
    write_trace(run_dir, run_dir / "trace.json")
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [event for event in events if event["ph"] == "X" and names[event["pid"], event["tid"]].startswith("draw")]
    assert sorted(event["name"] for event in drawn) == sorted(str(line[0]) for line in lines)
    assert {name for name in names.values() if name.startswith("draw")} == {"draw", "draw (2)", "draw (3)"}
    for one, other in itertools.combinations(drawn, 2):
        begins, ends = zip(*((event["ts"], event["ts"] + event["dur"]) for event in (one, other)), strict=True)
        is_apart = max(begins) >= min(ends)
        is_nested = (begins[0] - begins[1]) * (ends[0] - ends[1]) <= 0
        assert one["tid"] != other["tid"] or is_apart or is_nested


def test_a_resumed_run_has_two_processes_of_one_name(run_dir: Path):
    write(run_dir, "d", "main/0", [["actor.load", 300 * MS, MS, "MainThread"]])
    write_trace(run_dir, run_dir / "trace.json")
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    labels = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [label.partition(",")[0] for label in labels] == ["driver", "engines/0", "main/0", "main/0 (2)"]


def test_the_timeline_says_how_busy_processes_were_and_what_overlapped(run_dir: Path):
    timeline = Timeline.of(read_spans(run_dir))
    assert timeline is not None
    # 45 of 200 ms; 100 of 200 ms; generation from 50 to 90 ms, updates from 10 to 70 ms.
    assert "busy: engines/0 22%, main/0 50%." in timeline.text()
    assert timeline.text().endswith("Log-probs and updates ran during 50% of generation.")
    rows = timeline_figure(timeline).axes[0].get_yticklabels()
    assert [label.get_text() for label in rows] == ["engines/0", "main/0"]


def test_a_row_of_thousands_of_calls_is_drawn_in_one_piece_per_kind():
    # Engines answer ten times a second. With an artist per call, drawing the report of a long step took minutes.
    step = ProcessSpans("driver", 1, "h", (Span("train step 1", 0, 3_000_000, "MainThread"),))
    names = "rollout.advance", "reward.score"
    calls = tuple(Span(names[call % 2], 1000 * call, 900, "MainThread") for call in range(3000))
    timeline = Timeline.of([step, ProcessSpans("engines/0", 2, "h", calls)])
    assert timeline is not None
    bars = [one for one in timeline_figure(timeline).axes[0].collections if len(one.get_paths()) > 1]
    assert [len(one.get_paths()) for one in bars] == [1500, 1500]


def test_the_timeline_of_a_resumed_run_has_no_time_between_its_processes(run_dir: Path):
    hour = 3600 * 1000 * MS
    write(run_dir, "d", "driver", [["train step 3", hour, 100 * MS, "MainThread"]])
    write(run_dir, "e", "main/0", [["actor.train_step", hour, 60 * MS, "MainThread"]])
    write(run_dir, "f", "engines/0", [["engine", hour, 50 * MS, {"running": 3.0, "tokens": 20}]])
    processes = read_spans(run_dir)
    timeline = Timeline.of(processes)
    assert timeline is not None
    assert timeline.text() == "The last step. Share of time in which each process was busy: main/0 60%."
    panel = EnginePanel.of(timeline, processes)
    assert panel is not None
    assert panel.text().startswith("The last step: ")
    assert panel.text().endswith("engines/0 400 tokens/s, busy 50%.")


def test_the_timeline_is_that_of_the_process_before_while_a_resumed_one_has_no_step(run_dir: Path):
    before = Timeline.of(read_spans(run_dir))
    write(run_dir, "d", "driver", [["checkpoint", 3600 * 1000 * MS, MS, "MainThread"]])
    after = Timeline.of(read_spans(run_dir))
    assert before is not None
    assert after is not None
    assert after.text() == before.text()


def test_counters_have_rates_and_are_zero_while_nothing_was_recorded(run_dir: Path):
    write(run_dir, "b", "engines/0", [*ENGINE, *WINDOWS])
    write_trace(run_dir, run_dir / "trace.json")
    events = [e for e in json.loads((run_dir / "trace.json").read_text())["traceEvents"] if e["ph"] == "C"]
    assert {(e["pid"], e["name"]) for e in events} == {(2, "engine")}
    assert [(e["ts"] // MS, e["args"]["running"], e["args"]["tokens/s"]) for e in events] == [
        *((50, 3.0, 2000.0), (60, 1.0, 500.0), (80, 0.0, 0.0)),
        *((120, 2.0, 1000.0), (130, 0.0, 0.0)),
    ]


def test_the_panel_says_how_fast_each_engine_was_while_it_was_busy(run_dir: Path):
    write(run_dir, "b", "engines/0", [*ENGINE, *WINDOWS])
    write(run_dir, "c", "driver", [*DRIVER, ["router", 50 * MS, 10 * MS, {"waiting": 8}]])
    processes = read_spans(run_dir)
    timeline = Timeline.of(processes)
    assert timeline is not None
    panel = EnginePanel.of(timeline, processes)
    assert panel is not None
    # 20 + 10 + 10 tokens in 10 + 20 + 10 ms, of 200.
    assert panel.text().endswith("engines/0 1,000 tokens/s, busy 20%, KV cache at most 50%.")
    figure = engine_figure(panel)
    assert [axes.get_ylabel() for axes in figure.axes] == ["running", "waiting", "tokens/s", "KV cache"]
    assert area_of(figure.axes[2].collections[0]) == pytest.approx(40)  # under tokens per second: the tokens


def corners(collection: Collection) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of a polygon's corners."""
    (path,) = collection.get_paths()
    x, y = np.asarray(path.vertices).T
    return x, y


def area_of(collection: Collection) -> float:
    """Return the area of a polygon, by the shoelace formula."""
    x, y = corners(collection)
    return float(abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2)


def test_engines_that_do_the_same_are_all_visible(run_dir: Path):
    write(run_dir, "b", "engines/0", WINDOWS)
    write(run_dir, "d", "engines/1", WINDOWS)
    processes = read_spans(run_dir)
    timeline = Timeline.of(processes)
    assert timeline is not None
    panel = EnginePanel.of(timeline, processes)
    assert panel is not None
    assert "tokens per second, stacked by engine." in panel.text()
    running, *_, cache = engine_figure(panel).axes
    first, second = running.collections
    assert area_of(first) == pytest.approx(area_of(second)) != 0
    tops = [float(corners(one)[1].max()) for one in (first, second)]
    assert tops == [3.0, 6.0]
    assert running.get_ylim()[1] > 6.0
    assert cache.lines[0].get_linewidth() > cache.lines[1].get_linewidth()


def test_values_that_reach_over_the_steps_are_cut_and_engines_of_one_kind_have_fewer_plots(run_dir: Path):
    write(run_dir, "b", "engines/0", [["engine", 190 * MS, 40 * MS, {"running": 4.0, "tokens": 80}]])
    processes = read_spans(run_dir)
    timeline = Timeline.of(processes)
    assert timeline is not None
    panel = EnginePanel.of(timeline, processes)
    assert panel is not None
    assert panel.text().endswith("engines/0 2,000 tokens/s, busy 5%.")
    assert [axes.get_ylabel() for axes in engine_figure(panel).axes] == ["running", "tokens/s"]
    assert "requests that run, and tokens" in panel.text()  # nothing waits
    write(run_dir, "b", "engines/0", ENGINE)
    assert EnginePanel.of(timeline, read_spans(run_dir)) is None


def test_a_run_without_steps_has_no_timeline(tmp_path: Path):
    write(tmp_path, "a", "main/0", TRAINER)
    assert Timeline.of(read_spans(tmp_path)) is None


def test_a_step_in_which_only_the_driver_ran_has_no_timeline(run_dir: Path, tmp_path: Path):
    spans = read_spans(run_dir)
    assert Timeline.of(spans) is not None
    assert Timeline.of([one for one in spans if one.process == "driver"]) is None


def test_the_command_names_the_file_and_what_it_left_out(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    write(run_dir, "a", "main/0", TRAINER, tail='["actor.tra')
    assert main(["trace", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert f"{run_dir / 'trace.json'}: open it at https://ui.perfetto.dev" in out
    assert "skipped 1 incomplete lines of killed processes" in out


def test_a_full_disk_leaves_the_earlier_trace(run_dir: Path):
    (run_dir / "trace.json").write_text("earlier")
    with no_larger_than(100), pytest.raises(ReportError, match=r"the trace can't be written to .*: .*File too large"):
        write_trace(run_dir, run_dir / "trace.json")
    assert (run_dir / "trace.json").read_text() == "earlier"


def test_the_end_of_long_records_can_be_exported_alone(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    lines = (run_dir / "spans" / "c.jsonl").read_text().splitlines()
    last = len(lines[-1]) + 2
    assert main(["trace", str(run_dir), "--last-mb", str(last / 1e6)]) == 0
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    driver = [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert driver == [json.loads(lines[-1])[1]]
    with pytest.raises(SystemExit):
        main(["trace", str(run_dir), "--last-mb", "0"])
    assert "0 is not a number above 0" in capsys.readouterr().err


def test_a_folder_without_spans_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ReportError, match=r"contains no spans/\*\.jsonl"):
        read_spans(tmp_path)
    assert main(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("rlpack trace: ")


def test_a_file_that_cannot_be_written_is_one_error(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["trace", str(run_dir), "--out", str(run_dir / "missing" / "trace.json")]) == 2
    assert "the trace can't be written to" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_file_of_another_kind_is_one_error_and_never_waited_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
):
    make(run_dir / "spans" / "x.jsonl")
    assert main(["trace", str(run_dir)]) == 2
    assert "x.jsonl can't be read" in capsys.readouterr().err
