"""Sinks for metrics: always a JSONL file, optionally TensorBoard and Weights & Biases, behind one protocol."""

import importlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from rlpack.batch.errors import DataError
from rlpack.config.schema import Logger
from rlpack.installation import how_to_install, is_installed
from rlpack.observe.errors import SinkError, SinkUnavailableError, SinkWriteError
from rlpack.observe.metric_table import check_names
from rlpack.observe.run_dir import EVENTS, METRICS, WANDB_ID
from rlpack.safe_files import parse_json
from rlpack.whole_files import write_whole

logger = logging.getLogger(__name__)

LogPhase = Literal["sft_warmup", "train", "evaluation"]
RECORD_KEYS = frozenset({"step", "phase", "time_s"})


class Sink(Protocol):
    """A destination for metrics."""

    def log(self, step: int, phase: LogPhase, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step.

        Raises:
            SinkWriteError: they can't be written.
        """
        ...

    def close(self) -> None:
        """Write pending records and release resources; called once."""
        ...


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from; later records will be written again.

    Attributes:
        step: the step of the checkpoint.
        phase: the phase of that step; all of the warm-up precedes `train`.
        evaluation_is_due: whether the evaluation after that step will be written again, too.
    """

    step: int
    phase: LogPhase = "train"
    evaluation_is_due: bool = False

    def first_dropped(self, phase: str) -> int | None:
        """Return the first step of `phase` after the checkpoint, or None.

        >>> ResumePoint(20).first_dropped("train"), ResumePoint(20, "sft_warmup").first_dropped("train")
        (21, 0)
        >>> ResumePoint(20, evaluation_is_due=True).first_dropped("evaluation")
        20
        """
        if (phase == "sft_warmup") == (self.phase == "sft_warmup"):
            return self.step if phase == "evaluation" and self.evaluation_is_due else self.step + 1
        return None if phase == "sft_warmup" else 0

    def covers(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record was written before the checkpoint.

        >>> ResumePoint(20).covers({"phase": "sft_warmup", "step": 400})
        True
        """
        first = self.first_dropped(record["phase"])
        return first is None or int(record["step"]) < first


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file in order.

    NaN and infinities become floats again.

    Lines that can't be read, such as one cut by a crash, are skipped; one warning counts them.

    Raises:
        DataError: the file exists, but can't be read.
    """
    return (record for _, record in _read_lines(path))


def has_record(path: Path, phase: LogPhase, step: int) -> bool:
    """Return whether a metrics file has a record of a phase's step; lines that can't be read are ignored.

    Raises:
        DataError: the file exists, but can't be read.
    """
    records = (record for _, record in _read_lines(path, warns=False))
    return any((record["phase"], record["step"]) == (phase, step) for record in records)


def _read_lines(path: Path, *, warns: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that is a record, and the record; `warns` of other lines."""
    broken: list[int] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = parse_json(line)
            position = {"step": int(record["step"]), "phase": str(record["phase"])}
            figures = {name: float(value) for name, value in record.items() if name not in RECORD_KEYS}
            yield line, position | {"time_s": float(record["time_s"])} | figures
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            broken.append(number)
    if broken and warns:
        logger.warning(
            "%s: %d lines are not records and are skipped; the first is line %d", path, len(broken), broken[0]
        )


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, none if there is no file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            yield from stream
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}; make it readable") from error


class JsonlSink:
    """Appends each record to a file as one flushed line.

    A line has `step`, `phase`, `time_s`, and the metrics.
    """

    def __init__(self, path: Path, *, resume: ResumePoint | None = None) -> None:
        """Open the file.

        Args:
            path: the file; unless `resume` is given, the first record replaces its content.
            resume: keep the records up to this point, and delete the rest.
        """
        self._replaces_content = resume is None
        self._started = time.monotonic()
        if resume is not None:
            retained = [entry for entry in _read_lines(path) if resume.covers(entry[1])]
            self._started -= max((record["time_s"] for _, record in retained), default=0.0)
            write_whole(path, "".join(line.rstrip("\n") + "\n" for line, _ in retained))
        self._path = path
        self._stream: TextIO = path.open("a", encoding="utf-8")

    def log(self, step: int, phase: LogPhase, metrics: Mapping[str, float]) -> None:
        """Append one record; once this returns, it survives a crash of the process.

        Raises:
            SinkWriteError: the file can't be written, for example because the disk is full; it is closed.
        """
        check_names(metrics)
        seconds = round(time.monotonic() - self._started, 3)
        line = _line({"step": step, "phase": phase, "time_s": seconds, **metrics})
        try:
            if self._replaces_content:  # only now: if the run fails at startup, an earlier one's records stay
                self._replaces_content = False
                self._stream.truncate(0)
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:
            with suppress(OSError):  # the stream tries to write the line again, and is closed all the same
                self._stream.close()
            raise SinkWriteError(
                f"{self._path} can't be written ({error.strerror or error}); free some space, or restore access to the "
                "file, then continue the run with resume=auto"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardSink:
    """Writes TensorBoard event files: a TensorBoard run for each phase, with metric names as tags."""

    def __init__(self, folder: Path, *, resume: ResumePoint | None = None) -> None:
        """Write event files into `folder`; TensorBoard hides earlier records after `resume`, all of them without it."""
        self._board = importlib.import_module("torch.utils.tensorboard")
        self._folder = folder
        self._resume = resume
        self._writers: dict[LogPhase, Any] = {}

    def log(self, step: int, phase: LogPhase, metrics: Mapping[str, float]) -> None:
        """Add every metric as a scalar.

        Raises:
            SinkWriteError: the event file can't be written.
        """
        check_names(metrics)
        with self._writing():
            if phase not in self._writers:
                self._writers[phase] = self._open(phase)
            for name, value in metrics.items():
                self._writers[phase].add_scalar(name, value, step)

    def close(self) -> None:
        """Write pending events and close the files.

        Raises:
            SinkWriteError: an event file can't be written.
        """
        for writer in self._writers.values():
            with self._writing():
                writer.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # of TensorBoard's own thread, which writes
            raise SinkWriteError(
                f"{self._folder} can't be written ({error}); free some space, or set logger.tensorboard=false, and "
                "continue the run with resume=auto"
            ) from error

    def _open(self, phase: LogPhase) -> Any:
        """Open the event file of one phase; a completed warm-up is never purged."""
        folder = self._folder / phase
        purge = 0 if self._resume is None else self._resume.first_dropped(phase)
        return self._board.SummaryWriter(str(folder), purge_step=purge if folder.exists() else None)


class WandbSink:
    """Writes a Weights & Biases run with a step axis for each phase, `<phase>/step`."""

    def __init__(
        self, run_dir: Path, *, mode: Literal["offline", "online"], project: str, config: Mapping[str, Any]
    ) -> None:
        """Start a W&B run, or continue the one of the run directory.

        Raises:
            SinkError: the API key is missing, or the service refuses the run.
            SinkUnavailableError: the service can't be reached.
        """
        wandb = importlib.import_module("wandb")
        file = run_dir / WANDB_ID
        run_id = file.read_text(encoding="utf-8", errors="replace") if file.exists() else secrets.token_hex(4)
        # The command line and the console output may contain secrets and model text, so neither is uploaded.
        private = wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_meta=True)
        try:
            self._run = wandb.init(
                project=project, name=run_dir.name, dir=str(run_dir), mode=mode, config=dict(config), resume="allow",
                id=run_id, settings=private,
            )  # fmt: skip
        except wandb.Error as error:
            is_refused = isinstance(error, wandb.errors.AuthenticationError | wandb.errors.UsageError)
            raise (SinkError if is_refused else SinkUnavailableError)(
                f"logger.wandb={mode} can't start: {error}; set the environment variable WANDB_API_KEY or run "
                "`wandb login`, or set logger.wandb=offline and upload the run later with `wandb sync`"
            ) from error
        file.write_text(run_id, encoding="utf-8")
        for phase in ("sft_warmup", "train", "evaluation"):
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(self, step: int, phase: LogPhase, metrics: Mapping[str, float]) -> None:
        """Send every metric."""
        check_names(metrics)
        named = {name if name.startswith(f"{phase}/") else f"{phase}/{name}": value for name, value in metrics.items()}
        self._run.log(named | {f"{phase}/step": step})

    def close(self) -> None:
        """Wait until all records are sent (online) or written (offline)."""
        self._run.finish()


def open_sinks(
    settings: Logger, run_dir: Path, config: Mapping[str, Any], resume: ResumePoint | None = None
) -> list[Sink]:
    """Open the JSONL file and the sinks configured in the `logger` section.

    Args:
        settings: the section.
        run_dir: the run's existing directory.
        config: plain values without secrets, for Weights & Biases.
        resume: where the run resumes; None starts from scratch.

    Raises:
        SinkError: a package is missing.
    """
    check_packages(settings)
    optional: list[Sink] = []
    if settings.tensorboard:
        optional.append(TensorBoardSink(run_dir / EVENTS, resume=resume))
    if settings.wandb != "disabled":
        if (run_dir / WANDB_ID).exists():
            _warn_of_repeated_steps(run_dir / METRICS, resume)
        optional.append(WandbSink(run_dir, mode=settings.wandb, project=settings.wandb_project, config=config))
    return [JsonlSink(run_dir / METRICS, resume=resume), *optional]


def close_sinks(sinks: Sequence[Sink]) -> None:
    """Close every sink, and warn of those that fail.

    Raises:
        Exception: that of the first sink that failed.
    """
    errors: list[Exception] = []
    for sink in sinks:
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - of another package; raised once all are closed
            logger.warning("%s could not be closed: %s: %s", type(sink).__name__, type(error).__name__, error)
            errors.append(error)
    if errors:
        raise errors[0]


def _warn_of_repeated_steps(path: Path, resume: ResumePoint | None) -> None:
    """Warn of the recorded steps after the resume point: they can't be deleted from a Weights & Biases run."""
    repeated: dict[str, list[int]] = {}
    for _, record in _read_lines(path, warns=False):  # the JSONL sink warns
        if resume is None or not resume.covers(record):
            repeated.setdefault(record["phase"], []).append(record["step"])
    if repeated:
        spans = [f"{phase} from step {min(steps)} to {max(steps)}" for phase, steps in repeated.items()]
        logger.warning(
            "the Weights & Biases run has records after the point where this run continues, which can't be deleted, so "
            "these steps will appear there more than once: %s (metrics.jsonl and the report have each step once)",
            "; ".join(spans),
        )


def check_packages(settings: Logger, environment: Mapping[str, str] = os.environ) -> None:
    """Check that the packages of the configured sinks are installed, without importing them.

    Raises:
        SinkError: one is missing; names the package, the key and how to install it in this environment.
    """
    enabled = {"tensorboard": settings.tensorboard, "wandb": settings.wandb != "disabled"}
    for package, is_enabled in enabled.items():
        if is_enabled and not is_installed(package):
            key = f"logger.{package}"
            raise SinkError(
                f"{key} needs the package {package}, which is not installed; {how_to_install(package, environment)}, "
                f"or unset {key}"
            )


def _line(record: Mapping[str, Any]) -> str:
    """Return a record as strict JSON; NaN and infinities become strings."""
    return json.dumps({name: _to_json(value) for name, value in record.items()}, allow_nan=False) + "\n"


def _to_json(value: Any) -> str | int | float:
    """Return a value that JSON can represent; NumPy and torch scalars become floats."""
    if isinstance(value, str | int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")
