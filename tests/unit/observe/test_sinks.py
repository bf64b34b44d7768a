import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.config.schema import Logger
from rlpack.observe.errors import SinkError, SinkUnavailableError, SinkWriteError
from rlpack.observe.metric_table import UnknownMetricWarning
from rlpack.observe.sinks import JsonlSink, ResumePoint, TensorBoardSink, check_packages, open_sinks, read_records


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def filled(path: Path, steps: int = 4, sft_warmup: int = 6) -> None:
    sink = JsonlSink(path)
    for step in range(1, sft_warmup + 1):
        sink.log(step, "sft_warmup", {"sft_warmup/loss": float(step)})
    for step in range(1, steps + 1):
        sink.log(step, "train", {"reward/mean": step / 10})
        if step % 2 == 0:
            sink.log(step, "evaluation", {"evaluation/reward_greedy": step / 10})
    sink.close()


def test_a_record_is_one_line_on_the_disk_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(3, "train", {"reward/mean": 0.5})
    (record,) = lines(tmp_path / "m.jsonl")
    assert record.pop("time_s") >= 0
    assert record == {"step": 3, "phase": "train", "reward/mean": 0.5}
    sink.close()


def test_values_that_are_not_finite_are_strict_json_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path)
    sink.log(1, "train", {"actor/loss": float("nan"), "actor/kl": float("inf"), "actor/grad_norm": float("-inf")})
    sink.close()
    (record,) = lines(path)
    assert (record["actor/loss"], record["actor/kl"], record["actor/grad_norm"]) == ("NaN", "Infinity", "-Infinity")
    (read,) = read_records(path)
    assert read["actor/loss"] != read["actor/loss"]
    assert (read["actor/kl"], read["actor/grad_norm"]) == (float("inf"), float("-inf"))


def test_an_unknown_name_warns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    with pytest.warns(UnknownMetricWarning):
        sink.log(1, "train", {"my/metric": 1.0})
    sink.close()


def test_resuming_deletes_records_after_the_checkpoint_and_keeps_the_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    filled(path)
    sink = JsonlSink(path, resume=ResumePoint(2))
    sink.log(3, "train", {"reward/mean": 9.0})
    sink.close()
    found = [(record["phase"], record["step"]) for record in lines(path)]
    sft_warmup = [("sft_warmup", step) for step in range(1, 7)]
    assert found == [*sft_warmup, ("train", 1), ("train", 2), ("evaluation", 2), ("train", 3)]
    assert lines(path)[-1]["reward/mean"] == 9.0


def test_resuming_inside_the_warm_up_cuts_the_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    filled(path)  # the steps after the warm-up will be taken again, small as their numbers are
    JsonlSink(path, resume=ResumePoint(2, "sft_warmup")).close()
    assert [(record["phase"], record["step"]) for record in lines(path)] == [("sft_warmup", 1), ("sft_warmup", 2)]


def test_time_goes_on_where_the_kept_records_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "phase": "train", "time_s": 100.0}\n')
    sink = JsonlSink(path, resume=ResumePoint(1))
    sink.log(2, "train", {})
    sink.close()
    assert 100.0 <= lines(path)[-1]["time_s"] < 160.0


def test_the_first_record_of_a_new_run_replaces_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    filled(path)
    earlier = path.read_text()
    sink = JsonlSink(path)
    assert path.read_text() == earlier
    for step in (1, 2):
        sink.log(step, "train", {})
    sink.close()
    assert [(record["phase"], record["step"]) for record in lines(path)] == [("train", 1), ("train", 2)]


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_resumes_with_its_whole_records(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    filled(path)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    JsonlSink(path, resume=ResumePoint(10)).close()
    # A last line without its newline may be whole; all lines before it are.
    assert 0 <= len(lines(path)) - content.count(b"\n") <= 1


@pytest.mark.parametrize(
    ("package", "values"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": "offline"})]
)
def test_a_missing_package_is_one_clear_error_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, values: dict
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SinkError, match=rf"logger\.{package} needs .*; run `.*\[{package}\]'`, or unset logger"):
        open_sinks(Logger(**values), tmp_path, {})


def test_a_service_that_refuses_is_one_clear_error_with_the_fixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**options: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    text = r"logger\.wandb=online can't start: No API key .*WANDB_API_KEY.*wandb=offline"
    with pytest.raises(SinkError, match=text) as raised:
        open_sinks(Logger(wandb="online"), tmp_path, {})
    assert not isinstance(raised.value, SinkUnavailableError)
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_is_not_reached_may_be_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def time_out(**options: object) -> None:
        raise wandb.errors.CommError("Run initialization has timed out")

    monkeypatch.setattr(wandb, "init", time_out)
    with pytest.raises(SinkUnavailableError, match="can't start: Run initialization has timed out"):
        open_sinks(Logger(wandb="online"), tmp_path, {})


def test_a_folder_of_a_packages_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "tensorboard"):
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SinkError, match=r"needs the package wandb, which is not installed"):
        check_packages(Logger(wandb="offline"), {})
    with pytest.raises(SinkError, match=r"needs the package tensorboard, which is not installed"):
        check_packages(Logger(tensorboard=True), {})


def test_events_that_cannot_be_written_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.log(1, "train", {"reward/mean": 0.5})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    text = r"tensorboard can't be written \(.*No space left.*\); free some space, or set logger\.tensorboard=false"
    with pytest.raises(SinkWriteError, match=text):
        sink.log(2, "train", {"reward/mean": 0.5})
    monkeypatch.undo()
    sink.close()


@pytest.mark.parametrize(
    ("point", "had_wandb", "named"),
    [
        (ResumePoint(2), True, "train from step 3 to 4; evaluation from step 4 to 4 "),
        (None, True, "sft_warmup from step 1 to 6; train from step 1 to 4; evaluation from step 2 to 4 "),
        (ResumePoint(4), True, None),
        (ResumePoint(2), False, None),
    ],
)
def test_steps_that_a_wandb_run_will_have_more_than_once_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    point: ResumePoint | None,
    had_wandb: bool,
    named: str | None,
) -> None:
    monkeypatch.setattr("rlpack.observe.sinks.check_packages", lambda settings: None)
    monkeypatch.setattr("rlpack.observe.sinks.WandbSink", lambda *_, **__: None)
    filled(tmp_path / "metrics.jsonl")
    if had_wandb:
        (tmp_path / "wandb-id").write_text("a1b2c3d4")
    open_sinks(Logger(wandb="offline"), tmp_path, {}, point)[0].close()
    assert ("more than once" in caplog.text) == (named is not None)
    assert (named or "") in caplog.text


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.log(step, "sft_warmup", {"sft_warmup/loss": float(step)})
        first.log(step, "train", {"reward/mean": float(step)})
    first.close()
    resumed = TensorBoardSink(tmp_path, resume=ResumePoint(1))
    resumed.log(2, "train", {"reward/mean": 20.0})
    resumed.close()
    train, sft_warmup = EventAccumulator(str(tmp_path / "train")), EventAccumulator(str(tmp_path / "sft_warmup"))
    train.Reload()
    sft_warmup.Reload()
    assert [(event.step, event.value) for event in train.Scalars("reward/mean")] == [(1, 1.0), (2, 20.0)]
    assert [event.step for event in sft_warmup.Scalars("sft_warmup/loss")] == [1, 2, 3]


def test_tensorboard_hides_the_records_of_a_run_that_starts_over(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for values in ((1.0, 2.0, 3.0), (10.0, 20.0)):
        sink = TensorBoardSink(tmp_path)
        for step, value in enumerate(values):
            sink.log(step, "evaluation", {"evaluation/loss": value})
        sink.close()
    events = EventAccumulator(str(tmp_path / "evaluation"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("evaluation/loss")] == [(0, 10.0), (1, 20.0)]
