import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console as RichConsole

from rlpack.config.schema import Actor, Config, Logger, SFTWarmup, Trainer
from rlpack.config.sections.parallelism import Parallel
from rlpack.observe import console as console_module
from rlpack.observe.console import Console, Sample
from rlpack.observe.errors import MetricError, RunDirectoryError, RunTakenOverError, SinkError, SinkWriteError
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.report.report import write_report
from rlpack.observe.run import Run
from rlpack.observe.run_dir import check_records, check_run_dir, record_hashes
from rlpack.observe.run_end import RunEnd
from rlpack.observe.run_lock import lock_run_dir
from rlpack.observe.sinks import LogPhase, ResumePoint, read_records
from rlpack.packing.analysis.data_rank import DataRank
from rlpack.packing.batching import Batching
from rlpack.packing.make_plan import make_plan
from rlpack.run_log import attached_log


def start(directory: Path, config: Config | None = None, resume_at: ResumePoint | None = None) -> Run:
    console = Console(RichConsole(file=io.StringIO(), width=200))
    return Run.start(config or Config(), directory, resume_at=resume_at, console=console)


def test_a_run_leaves_config_metrics_and_report(tmp_path: Path) -> None:
    with start(tmp_path / "run", Config(seed=5)) as run:
        run.log(1, {"reward/mean": 0.5})
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 5
    assert Config.model_validate(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())) == Config(seed=5)
    assert (tmp_path / "run" / "report.html").exists()
    (record,) = read_records(tmp_path / "run" / "metrics.jsonl")
    assert record["reward/mean"] == 0.5


@pytest.mark.parametrize(
    ("error", "end", "notice"),
    [
        (None, {"status": "finished", "error": ""}, None),
        (KeyboardInterrupt(), {"status": "stopped", "error": ""}, "Stopped after 2 of 5 training steps"),
        (
            ValueError("<b>no</b> answer"),
            {"status": "failed", "error": "ValueError: <b>no</b> answer"},
            "Failed after 2 of 5 training steps</h2><p>ValueError: &lt;b&gt;no&lt;/b&gt; answer (see run.log).",
        ),
    ],
)
def test_the_directory_and_the_report_say_how_the_run_ended(
    tmp_path: Path, error: BaseException | None, end: dict[str, str], notice: str | None
) -> None:
    directory = tmp_path / "run"
    with suppress(ValueError, KeyboardInterrupt), start(directory, Config(trainer=Trainer(steps=5))) as run:
        run.log(1, {"reward/mean": 0.5})
        run.log(2, {"reward/mean": 0.5})
        assert not (directory / "end.json").exists()
        if error is not None:
            raise error
    assert json.loads((directory / "end.json").read_text()) == end
    page = (directory / "report.html").read_text()
    assert notice is None or notice in page
    assert (notice is None) == (" training steps</h2>" not in page)
    again = start(directory, Config(trainer=Trainer(steps=5), resume="auto"))
    assert not (directory / "end.json").exists()  # it is in progress
    assert "Not finished: after 2 of 5 training steps" in write_report(directory).read_text()
    again.finish()


@pytest.mark.parametrize("content", ["{", "[]", '{"status": "bored"}', '{"status": ["failed"]}', '{"error": "x"}'])
def test_a_damaged_end_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "end.json").write_text(content)
    assert RunEnd.read(tmp_path) is None


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("hard", "'hard'"),
        ("0.5", "'0.5'"),
        (None, "None"),
        (torch.ones(2), "tensor([1., 1.])"),
        (np.ones(2), "array([1., 1.])"),
        (torch.ones(2, 2), "tensor([[1., ... [1., 1.]])"),
        (10**309, f"1{'0' * 17}...{'0' * 19}"),
    ],
)
def test_a_metric_that_is_not_one_number_is_named_before_anything_is_written(tmp_path: Path, value: Any, what: str):
    with start(tmp_path) as run:
        run.log(1, {"reward/mean": 0.5})
        with pytest.raises(MetricError, match=re.escape(f"metric 'recipe/x' is {what}; a metric is one number")):
            run.log(2, {"reward/mean": 0.5, "recipe/x": value})
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["step"] == 1


def test_a_metric_may_be_any_scalar(tmp_path: Path):
    values = {"a": 3, "b": True, "c": np.float32(0.5), "d": torch.tensor([0.25]), "e": torch.tensor(2), "f": math.inf}
    with start(tmp_path) as run:
        run.log(1, {f"recipe/{name}": value for name, value in values.items()})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line.endswith(
        '"recipe/a": 3, "recipe/b": 1.0, "recipe/c": 0.5, "recipe/d": 0.25, "recipe/e": 2.0, "recipe/f": "Infinity"}'
    )
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record | {f"recipe/{name}": float(value) for name, value in values.items()} == record


def flat(reward: float = 0.0) -> dict[str, float]:
    """Return the metrics of a step in which every response got the same reward."""
    return {"reward/mean": reward, "reward/min": reward, "reward/max": reward}


@pytest.mark.parametrize(
    ("steps", "warns"),
    [
        ([flat(), flat(), flat(), flat()], True),
        ([flat(1.0), {"reward/mean": 0.5, "reward/min": 0, "reward/max": 1, "advantage/zero_group_fraction": 1}], True),
        ([flat(), {"reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0}, flat(), flat()], False),
        ([{"reward/mean": 0.5, "reward/min": 0, "reward/max": 1, "advantage/zero_group_fraction": 0.9}] * 3, False),
        ([{"actor/loss": 1.0}] * 3, False),  # supervised
    ],
)
def test_first_steps_of_equal_rewards_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: list[dict[str, float]], warns: bool
) -> None:
    with start(tmp_path) as run:
        for number, metrics in enumerate(steps, 1):
            run.log(number, metrics)
            run.log(number, flat(), phase="evaluation")
    warnings = [record.getMessage() for record in caplog.records if "learning signal" in record.getMessage()]
    assert len(warnings) == warns
    assert all("no learning signal in 2 training steps" in text and "reward/mean" in text for text in warnings)


def test_a_resumed_run_and_one_that_is_over_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start(tmp_path, Config(trainer=Trainer(steps=2))) as run:
        for step in (1, 2):
            run.log(step, flat())
    with start(tmp_path, Config(resume="auto"), resume_at=ResumePoint(2, "train")) as run:
        for step in (3, 4):
            run.log(step, flat())
    assert "learning signal" not in caplog.text


def test_a_slow_warm_up_shows_its_steps_as_lines_like_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    printed = io.StringIO()
    config = Config(sft_warmup=SFTWarmup(steps=500))
    with (
        Run.start(config, tmp_path, console=Console(RichConsole(file=printed, width=200))) as run,
        run.progress(500, "sft_warmup") as bar,
    ):
        for step in range(1, 51):
            clock[0] += 12.0 if step == 30 else 0.1
            run.log(step, {"sft_warmup/loss": 1.0}, phase="sft_warmup")
            bar.advance()
        lines = printed.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/500", "25/500", "30/500", "50/500"]
    assert all(line.split() == ["warm-up", line.split()[1], "loss", "1.000"] for line in lines)


@pytest.mark.parametrize("waste", [0.0, 0.3])
def test_the_final_table_has_metrics_of_plans_and_explains_where_something_is_lost(
    tmp_path: Path, waste: float
) -> None:
    printed = io.StringIO()
    with Run.start(Config(), tmp_path, console=Console(RichConsole(file=printed, width=200))) as run:
        for step in (1, 2):
            run.log(step, {"reward/mean": 0.5, "packing/waste_ratio": waste, "packing/bin_utilization": 0.2})
    end = printed.getvalue().partition("mean reward")[2].splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in end if "packing/" in line]
    assert rows == [
        ["packing/bin_utilization", "0.2", "0.2", "0.2"],
        ["packing/waste_ratio", "0.3", "0.3", "0.3", "Token slots that hold no real token."]
        if waste
        else ["0 in all steps", "0", "0", "0", "packing/waste_ratio"],
    ]
    assert "report:" in end[-1]


def test_timers_add_up_until_the_next_log(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        for _ in range(2):
            with run.timer("generate"):
                time.sleep(0.02)
        run.log(1, {"time/generate_s": 3.0})
        run.log(2, {})
    first, second = read_records(tmp_path / "metrics.jsonl")
    assert 3.04 <= first["time/generate_s"] < 4
    assert "time/generate_s" not in second


def test_time_counts_when_the_work_fails(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        with pytest.raises(KeyError), run.timer("reward"):
            raise KeyError
        run.log(1, {})
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert "time/reward_s" in record


def test_a_directory_that_holds_a_run_is_refused_unless_resumed(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.log(1, {"reward/mean": 0.1})
        run.log(2, {"reward/mean": 0.2})
    with pytest.raises(RunDirectoryError, match="already contains a run; continue it with resume=auto"):
        start(tmp_path / "run")
    with start(tmp_path / "run", Config(resume="auto"), ResumePoint(1)) as run:
        run.log(2, {"reward/mean": 0.3})
    assert [record["reward/mean"] for record in read_records(tmp_path / "run" / "metrics.jsonl")] == [0.1, 0.3]


def test_a_run_that_failed_before_its_first_record_leaves_its_directory_free_and_reports_nothing(
    tmp_path: Path,
) -> None:
    screen = io.StringIO()

    def fail() -> None:
        with Run.start(Config(), tmp_path / "run", console=Console(RichConsole(file=screen, width=200))) as run:
            (run.run_dir / "checkpoints" / "reference" / "step-0").mkdir(parents=True)
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert not (tmp_path / "run").exists()
    assert screen.getvalue() == ""


@pytest.mark.parametrize("stage", ["sinks", "roles"])
def test_a_run_that_starts_over_and_fails_before_its_first_record_leaves_the_earlier_files(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path) as run:
        run.log_samples([Sample("p", "c")])
        run.log(1, {"reward/mean": 0.1})
        run.note("the first attempt")
    names = ("metrics.jsonl", "samples.jsonl")
    before = {name: (tmp_path / name).read_text() for name in names}

    def fail() -> None:
        if stage == "sinks":
            monkeypatch.setattr("rlpack.observe.run.open_sinks", lambda *arguments: signal.raise_signal(signal.SIGINT))
        with start(tmp_path, Config(resume="auto")) as run:
            run.note("starting the roles")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {name: (tmp_path / name).read_text() for name in names} == before
    assert (tmp_path / "config.yaml").exists()
    assert "the first attempt" in (tmp_path / "run.log").read_text()


def test_a_run_that_starts_over_replaces_the_earlier_records_with_its_first_one(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        for step in (1, 2):
            run.log_samples([Sample("p", f"c{step}")])
            run.log(step, {"reward/mean": 0.1})
    with start(tmp_path, Config(resume="auto")) as run:
        run.log(1, {"reward/mean": 0.2})
        assert not (tmp_path / "samples.jsonl").exists()
        run.log_samples([Sample("p", "new")])
        run.log(2, {"reward/mean": 0.3})
    assert [record["reward/mean"] for record in read_records(tmp_path / "metrics.jsonl")] == [0.2, 0.3]
    assert [json.loads(line)["completion"] for line in (tmp_path / "samples.jsonl").open()] == ["new"]


def test_a_run_that_failed_after_its_first_record_keeps_its_directory(tmp_path: Path) -> None:
    def fail() -> None:
        with start(tmp_path / "run") as run:
            run.log(1, {})
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(RunDirectoryError, match="already contains a run"):
        start(tmp_path / "run")


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_with_files_of_no_run_is_refused_and_one_with_hydras_own_is_not(
    tmp_path: Path, resume: bool
) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "multirun.yaml").touch()
    check_run_dir(tmp_path, resume=resume)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match=r"contains unrelated files \(thesis\.tex\); choose another run_dir"):
        check_run_dir(tmp_path, resume=resume)


def test_a_directory_that_only_holds_checkpoints_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunDirectoryError, match="already contains a run"):
        check_run_dir(tmp_path, resume=False)


def test_a_finished_run_whose_checkpoints_are_gone_is_not_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(tmp_path / "run") as run:
        run.log(1, {"reward/mean": 0.1})
    with start(tmp_path / "run", Config(resume="auto")):  # it was killed before its first checkpoint
        pass
    assert "contains no checkpoint, so the run starts again from the beginning" in caplog.text
    with start(tmp_path / "other") as run:
        run.log(1, {"reward/mean": 0.1})
    (tmp_path / "other" / "model").mkdir()
    with pytest.raises(RunDirectoryError, match=r"finished run, whose checkpoints are gone, .* choose another run_dir"):
        start(tmp_path / "other", Config(resume="auto"))
    assert len(list(read_records(tmp_path / "other" / "metrics.jsonl"))) == 1


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path, inside: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="choose another run_dir"):
        start(tmp_path / "file" / "run" if inside else tmp_path / "file")


def test_a_missing_package_leaves_the_directory_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SinkError):
        start(tmp_path / "run", Config(logger=Logger(tensorboard=True)))
    assert not (tmp_path / "run").exists()


def test_resuming_with_other_values_says_which(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path).finish()
    start(tmp_path, Config(seed=2, resume="auto")).finish()
    assert "values that changed since the last start: seed=2 (was 1)" in caplog.text


def test_secrets_are_hidden_and_token_counts_are_not(tmp_path: Path) -> None:
    config = Config.model_validate({"reward": {"arguments": {"api_key": "s3cret", "nested": {"hf_token": "s3cret"}}}})
    start(tmp_path, config).finish()
    assert "s3cret" not in (tmp_path / "config.yaml").read_text() + (tmp_path / "report.html").read_text()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["batching"]["max_tokens"] == 4096


def test_rollouts_and_plan_are_kept_with_the_step_that_logs_them(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        run.log(400, {"sft_warmup/loss": 1.0}, phase="sft_warmup")
        run.log_samples([Sample("p\ud800", "c", None, 1.0)])
        run.record_plan(make_plan(np.array([3, 4]), Batching(), dp_size=2), responses=[1, 2])
        run.log(1, {})
    assert json.loads((tmp_path / "samples.jsonl").read_text())["step"] == 1
    record = json.loads((tmp_path / "packing.json").read_text())
    assert (record["step"], record["lengths"], record["responses"]) == (1, [3, 4], [1, 2])
    assert (tmp_path / "packing.png").exists()


def test_a_plan_is_kept_with_the_ranks_that_share_its_rows(tmp_path: Path) -> None:
    parallel = Parallel(cp=2, tp=4, pp=3, cp_method="all_gather")
    with start(tmp_path, Config(actor=Actor(parallel=parallel))) as run:
        run.record_plan(make_plan(np.array([3, 4]), Batching(), dp_size=2))
        run.log(1, {})
    assert PlanRecord.read(tmp_path / "packing.json").data_rank == DataRank(cp=2, tp=4, pp=3, chunks=4)


@pytest.mark.parametrize(("point", "kept"), [(ResumePoint(1), ["c1"]), (ResumePoint(300, "sft_warmup"), [])])
def test_resuming_cuts_the_rollouts_too(tmp_path: Path, point: ResumePoint, kept: list[str]) -> None:
    with start(tmp_path) as run:
        for step in (1, 2):
            run.log_samples([Sample("p", f"c{step}")])
            run.log(step, {})
    start(tmp_path, Config(resume="auto"), point).finish()
    found = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["completion"] for line in found] == kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpack.observe.run.SAME_SIGTERM_S", 0.0)
    usual = signal.getsignal(number)
    with start(tmp_path) as run:
        run.has_begun = True
        signal.raise_signal(number)
        assert run.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is usual
    assert "finishing the step, then saving; press Ctrl-C again to stop at once" in capfd.readouterr().err


def test_a_signal_before_the_first_step_speaks_of_no_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with start(tmp_path) as run:
        signal.raise_signal(signal.SIGINT)
        assert run.interrupted
    said = capfd.readouterr().err
    assert "interrupted: stopping once the roles have started; press Ctrl-C again to stop at once" in said
    assert "saving" not in said


def test_a_sigterm_to_the_process_and_to_its_group_is_one(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert run.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_hangups_are_noted_and_never_stop_a_run_at_once(tmp_path: Path) -> None:
    usual = signal.getsignal(signal.SIGHUP)
    with start(tmp_path) as run:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert run.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is usual


def test_under_nohup_a_hangup_changes_nothing(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with start(tmp_path) as run:
            signal.raise_signal(signal.SIGHUP)
            assert not run.interrupted
    finally:
        signal.signal(signal.SIGHUP, before)


INTO_A_PIPE = """
import sys, time
from hashlib import sha256
from pathlib import Path
from rlpack.config.schema import Config
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.report.report import write_report
from rlpack.observe.run import Run
with Run.start(Config(), Path(sys.argv[1])) as run:
    run.log(1, {"reward/mean": 0.5})
    while not run.interrupted:
        time.sleep(0.01)
    run.log(2, {"reward/mean": 0.6})
    run.note("saved")
(Path(sys.argv[1]) / "ended").touch()
"""


@pytest.mark.parametrize("has_both", [True, False])
def test_ctrl_c_that_also_ends_the_reader_of_a_pipe_lets_the_run_save(tmp_path: Path, has_both: bool) -> None:
    """As `rlpack train | tee log`, or `2>&1 | tee log`."""
    error = subprocess.STDOUT if has_both else subprocess.DEVNULL
    command = [sys.executable, "-c", INTO_A_PIPE, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error) as process:
        assert process.stdout is not None
        while b"step 1" not in (line := process.stdout.readline()):
            assert line, "the run ended before its first step"
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert (tmp_path / "run" / "ended").exists()
    assert len(list(read_records(tmp_path / "run" / "metrics.jsonl"))) == 2


IN_A_TERMINAL = """
import sys, time
from hashlib import sha256
from pathlib import Path
from rlpack.config.schema import Config
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.report.report import write_report
from rlpack.observe.run import Run
with Run.start(Config(), Path(sys.argv[1])) as run, run.progress(5, "train") as bar:
    run.log(1, {"reward/mean": 0.5})
    while not run.interrupted:
        time.sleep(0.01)
    print("not to be read", flush=True)
    run.log(2, {"reward/mean": 0.6})
    bar.advance()
    run.note("saved")
(Path(sys.argv[1]) / "ended").touch()
"""


def test_a_run_whose_terminal_is_closed_still_finishes_its_step_and_its_report(tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True) as process:
        os.close(inside)
        seen = b""
        while b"step 1" not in seen:
            seen += os.read(terminal, 1000)
        os.close(terminal)
        process.send_signal(signal.SIGHUP)  # as the terminal's shell does
        assert process.wait(timeout=60) == 0
    assert [record["step"] for record in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "ended").exists()


def test_a_run_outside_the_main_thread_leaves_ctrl_c_alone(tmp_path: Path) -> None:
    def work() -> None:
        with start(tmp_path) as run:
            run.log(1, {})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (tmp_path / "report.html").exists()


def test_an_error_inside_a_run_comes_out_and_the_report_is_written(tmp_path: Path) -> None:
    def fail() -> None:
        with start(tmp_path) as run:
            run.log(1, {"reward/mean": 0.1})
            raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        fail()
    assert (tmp_path / "report.html").exists()


def test_a_report_that_fails_does_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(run_dir: Path) -> Path:
        raise OSError("no space left")

    def fail() -> None:
        with start(tmp_path) as run:
            run.log(1, {})
            monkeypatch.setattr("rlpack.observe.report.report.write_report", broken)
            raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        fail()
    assert "the report could not be written" in caplog.text


@pytest.mark.parametrize("name", ["samples.jsonl", "metrics.jsonl"])
def test_a_crash_while_later_records_are_deleted_leaves_the_file_as_it_was(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path) as run:
        for step in (1, 2):
            run.log_samples([Sample("p", f"c{step}")])
            run.log(step, {"reward/mean": 0.5})
    before, replace = (tmp_path / name).read_text(), os.replace

    def crash(source: Path, target: Path) -> None:
        if target == tmp_path / name:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, Config(resume="auto"), ResumePoint(1))
    assert (tmp_path / name).read_text() == before


@pytest.mark.parametrize("name", ["samples.jsonl", "packing.json"])
def test_a_file_that_only_the_report_reads_and_that_cannot_be_written_only_warns(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with start(tmp_path) as run:
        (tmp_path / name).mkdir()  # as good as no permission, which root always has
        run.log_samples([Sample("1+1=", "2", 1.0, 0.5)])
        run.record_plan(make_plan([3, 4], Batching(), dp_size=1))
        run.log(1, {"reward/mean": 0.5})
    assert "step 1 of train will be missing from the report: [Errno 21]" in caplog.text
    assert len(list(read_records(tmp_path / "metrics.jsonl"))) == 1


def fill_disk(path: Path) -> None:
    """Let every further write to an open file fail, as on a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_symlink() and os.readlink(descriptor) == str(path):
            os.dup2(full, int(descriptor.name))
    os.close(full)


def test_metrics_that_do_not_fit_on_the_disk_are_one_error_and_the_report_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"

    def fail() -> None:
        with start(tmp_path) as run:
            run.log(1, {"reward/mean": 0.1})
            fill_disk(path)
            run.log(2, {"reward/mean": 0.2})

    with pytest.raises(SinkWriteError) as caught:
        fail()
    assert str(caught.value) == (
        f"{path} can't be written (No space left on device); free some space, or restore access to the file, then "
        "continue the run with resume=auto"
    )
    assert (tmp_path / "report.html").exists()
    assert [record["step"] for record in read_records(path)] == [1]
    assert "could not be closed" not in caplog.text


class FailingSink:
    """A sink that can't be closed."""

    def __init__(self, closed: list[str], text: str) -> None:
        self._closed, self._text = closed, text

    def log(self, step: int, phase: LogPhase, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        self._closed.append(self._text)
        raise OSError(self._text)


@pytest.mark.parametrize("fails_before", [False, True])
def test_a_sink_that_cannot_be_closed_hinders_neither_the_others_nor_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails_before: bool
) -> None:
    start(tmp_path).finish()
    closed: list[str] = []
    sinks = [FailingSink(closed, text) for text in ("first", "second")]

    def fail() -> None:
        with Run(tmp_path, sinks, Console(RichConsole(file=io.StringIO())), {}) as run:
            (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "train", "time_s": 1.0}\n')
            run.log(1, {})
            if fails_before:
                raise KeyError("first of all")

    (tmp_path / "report.html").unlink(missing_ok=True)
    with pytest.raises(KeyError if fails_before else OSError, match="first"):
        fail()
    assert closed == ["first", "second"]
    end = RunEnd("failed", "KeyError: 'first of all'" if fails_before else "OSError: first")
    assert RunEnd.read(tmp_path) == end
    assert (tmp_path / "report.html").exists()
    for text in closed:
        assert f"FailingSink could not be closed: OSError: {text}" in caplog.text


@pytest.mark.parametrize("name", ["report.html", "packing.png"])
def test_a_report_or_picture_that_cannot_be_written_only_warns(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = make_plan(np.array([3, 5]), Batching(mode="packed", max_tokens=8), dp_size=1)
    with start(tmp_path) as run:
        run.record_plan(plan)
        run.log(1, {"reward/mean": 0.5})
        (tmp_path / name).mkdir()
    (warning,) = (record.message for record in caplog.records if "can't be written" in record.message)
    assert f"the report of {tmp_path} can't be written: {tmp_path / name}: Is a directory; change its per" in warning
    assert name in warning


def test_a_run_whose_directory_was_taken_over_leaves_it_alone(tmp_path: Path) -> None:
    def lose() -> None:
        with lock_run_dir(tmp_path) as lock, Run.start(Config(), tmp_path, console=Console(), lock=lock) as run:
            (tmp_path / "run.lock").write_text("another process")
            run.log(1, {"reward/mean": 0.5})

    with pytest.raises(RunTakenOverError):
        lose()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl", "run.lock", "run.log"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_starting_a_run_does_not_import_torch_or_matplotlib() -> None:
    code = (
        "import sys; import rlpack.observe.run_dir, rlpack.checkpoint.commit, rlpack.observe.sinks; "
        "print(sorted({'torch', 'matplotlib', 'ray', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3], check=True
    )
    assert ended.stdout.strip() == "[]"


def test_records_that_change_after_a_checkpoint_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "wandb-id"):
        (tmp_path / name).write_text(f"{name} as it was")
    hashes = record_hashes(tmp_path)
    check_records(tmp_path, hashes)
    assert not caplog.text
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "wandb-id").write_text("another")
    check_records(tmp_path, hashes)
    assert f"samples.jsonl and wandb-id in {tmp_path} changed after the checkpoint was written" in caplog.text


def test_records_that_follow_a_checkpoint_change_nothing_and_shorter_ones_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("as it was\n")
    hashes = record_hashes(tmp_path)
    assert hashes["metrics.jsonl"]["sha256"] == sha256(b"as it was\n").hexdigest()
    metrics.write_text("as it was\nan evaluation\n")
    check_records(tmp_path, hashes)
    assert not caplog.text
    # Older versions hashed whole files, which evaluations did not follow.
    metrics.write_text("as it was\n")
    check_records(tmp_path, {name: found["sha256"] for name, found in hashes.items()})
    assert not caplog.text
    metrics.write_text("as it")
    check_records(tmp_path, hashes)
    assert f"metrics.jsonl in {tmp_path} changed after the checkpoint was written" in caplog.text


def test_switching_wandb_on_in_a_resumed_run_changes_no_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text("as it was")
    hashes = record_hashes(tmp_path)
    (tmp_path / "wandb-id").write_text("a1b2c3d4")
    check_records(tmp_path, hashes)
    assert not caplog.text


def test_an_empty_file_that_a_checkpoint_does_not_know_changes_no_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text("as it was")
    hashes = record_hashes(tmp_path)
    (tmp_path / "samples.jsonl").touch()  # written after the checkpoint, and emptied by the resumed run
    check_records(tmp_path, hashes)
    assert not caplog.text
    (tmp_path / "samples.jsonl").write_text("of another run")
    check_records(tmp_path, hashes)
    assert f"samples.jsonl in {tmp_path} changed after the checkpoint was written" in caplog.text


def test_a_run_has_steps_once_a_step_is_logged(tmp_path: Path) -> None:
    with attached_log("driver") as log, start(tmp_path) as run:
        run.log(0, {"reward/mean": 0.5}, phase="evaluation")
        assert not log.has_steps
        run.log(1, {"reward/mean": 0.5})
        assert log.has_steps
