"""Where metrics go: a JSONL file always, TensorBoard and Weights & Biases on demand, all behind one protocol."""

import importlib
import importlib.util
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from rlpack.config.schema import Logger
from rlpack.observe.errors import SinkError
from rlpack.observe.metric_table import check_names
from rlpack.observe.run_dir import EVENTS, METRICS

logger = logging.getLogger(__name__)

Phase = Literal["sft_warmup", "train", "evaluation"]
RECORD_KEYS = frozenset({"step", "phase", "time_s"})


class Sink(Protocol):
    """Something that metrics are written to."""

    def log(self, step: int, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        ...

    def close(self) -> None:
        """Write what is pending and let go; called once."""
        ...


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: after `step` of `phase`. Records behind it will be written again.

    Attributes:
        step: the step of the checkpoint.
        phase: the phase of that step; the warm-up comes before all of `train`.
    """

    step: int
    phase: Phase = "train"

    def first_dropped(self, phase: str) -> int | None:
        """Return the first step of `phase` whose records lie behind the checkpoint; None when none does.

        >>> ResumePoint(20).first_dropped("train"), ResumePoint(20, "sft_warmup").first_dropped("train")
        (21, 0)
        """
        if (phase == "sft_warmup") == (self.phase == "sft_warmup"):
            return self.step + 1
        return None if phase == "sft_warmup" else 0

    def covers(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record belongs to what came before the checkpoint.

        >>> ResumePoint(20).covers({"phase": "sft_warmup", "step": 400})
        True
        """
        first = self.first_dropped(record["phase"])
        return first is None or int(record["step"]) < first


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file in order, metrics that are not finite as floats again.

    Lines that can't be read, as a crash may leave one behind, are left out with one warning that counts them.
    """
    if not path.exists():
        return
    broken: list[int] = []
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                record = json.loads(line)
                yield {
                    "step": int(record["step"]),
                    "phase": str(record["phase"]),
                    "time_s": float(record["time_s"]),
                } | {name: float(value) for name, value in record.items() if name not in RECORD_KEYS}
            except (ValueError, KeyError, TypeError):
                broken.append(number)
    if broken:
        logger.warning("%s: lines left out that are no records: %d, the first is line %d", path, len(broken), broken[0])


class JsonlSink:
    """Appends one flushed line a record to a file: `step`, `phase`, `time_s`, then the metrics."""

    def __init__(self, path: Path, *, resume: ResumePoint | None = None) -> None:
        """Open the file.

        Args:
            path: the file; begun anew unless `resume` is given.
            resume: keep the records up to this point, cut off the rest.
        """
        kept = [record for record in read_records(path) if resume is not None and resume.covers(record)]
        self._began = time.monotonic() - max((record["time_s"] for record in kept), default=0.0)
        # Cut by replacement: a crash meanwhile leaves the old file whole.
        staging = path.with_name(path.name + ".tmp")
        staging.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        os.replace(staging, path)
        self._stream: TextIO = path.open("a", encoding="utf-8")

    def log(self, step: int, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Append one record; after this it survives the process."""
        check_names(metrics)
        seconds = round(time.monotonic() - self._began, 3)
        self._stream.write(_line({"step": step, "phase": phase, "time_s": seconds, **metrics}))
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardSink:
    """Writes event files that TensorBoard reads; each phase is a run of its own there, tags are metric names."""

    def __init__(self, folder: Path, *, resume: ResumePoint | None = None) -> None:
        """Prepare event files in `folder`; with `resume`, TensorBoard hides what is behind that point."""
        self._board = importlib.import_module("torch.utils.tensorboard")
        self._folder = folder
        self._resume = resume
        self._writers: dict[Phase, Any] = {}

    def log(self, step: int, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Add every metric as a scalar."""
        check_names(metrics)
        if phase not in self._writers:
            self._writers[phase] = self._open(phase)
        for name, value in metrics.items():
            self._writers[phase].add_scalar(name, value, step)

    def close(self) -> None:
        """Write pending events and close the files."""
        for writer in self._writers.values():
            writer.close()

    def _open(self, phase: Phase) -> Any:
        """Open the event file of one phase; a finished warm-up is never purged."""
        purge = None if self._resume is None else self._resume.first_dropped(phase)
        return self._board.SummaryWriter(str(self._folder / phase), purge_step=purge)


class WandbSink:
    """Writes a Weights & Biases run; each phase has its own step axis, `<phase>/step`."""

    def __init__(
        self, run_dir: Path, *, mode: Literal["offline", "online"], project: str, config: Mapping[str, Any]
    ) -> None:
        """Start the W&B run (needs the package wandb), or go on with the one that the run directory began.

        Raises:
            SinkError: there is no key, or the service refuses or can't be reached.
        """
        wandb = importlib.import_module("wandb")
        file = run_dir / "wandb-id"
        identity = file.read_text(encoding="utf-8") if file.exists() else secrets.token_hex(4)
        # The command line and what the terminal shows may hold secrets and model text: neither is taken along.
        private = wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_meta=True)
        try:
            self._run = wandb.init(
                project=project, name=run_dir.name, dir=str(run_dir), mode=mode, config=dict(config), resume="allow",
                id=identity, settings=private,
            )  # fmt: skip
        except wandb.Error as error:
            raise SinkError(
                f"logger.wandb={mode} can't start: {error}; set the environment variable WANDB_API_KEY or log in by "
                "`wandb login`, or set logger.wandb=offline and send the run later by `wandb sync`"
            ) from error
        file.write_text(identity, encoding="utf-8")
        for phase in ("sft_warmup", "train", "evaluation"):
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(self, step: int, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Send every metric."""
        check_names(metrics)
        named = {name if name.startswith(f"{phase}/") else f"{phase}/{name}": value for name, value in metrics.items()}
        self._run.log(named | {f"{phase}/step": step})

    def close(self) -> None:
        """Wait until everything is sent (online) or written (offline)."""
        self._run.finish()


def open_sinks(
    settings: Logger, run_dir: Path, config: Mapping[str, Any], resume: ResumePoint | None = None
) -> list[Sink]:
    """Open the JSONL file, and what else the `logger` section asks for.

    Args:
        settings: the section.
        run_dir: the run's directory, which exists.
        config: plain values without secrets, shown by Weights & Biases.
        resume: where the run goes on; None begins anew.

    Raises:
        SinkError: a package is missing.
    """
    check_packages(settings)
    others: list[Sink] = []
    if settings.tensorboard:
        others.append(TensorBoardSink(run_dir / EVENTS, resume=resume))
    if settings.wandb != "disabled":
        others.append(WandbSink(run_dir, mode=settings.wandb, project=settings.wandb_project, config=config))
    return [JsonlSink(run_dir / METRICS, resume=resume), *others]


def check_packages(settings: Logger) -> None:
    """Check that the packages of the sinks that are asked for are installed, without importing them.

    Raises:
        SinkError: names the package, the key and the extra.
    """
    asked = {"tensorboard": settings.tensorboard, "wandb": settings.wandb != "disabled"}
    for package, wanted in asked.items():
        if wanted and importlib.util.find_spec(package) is None:
            key = f"logger.{package}"
            raise SinkError(
                f"{key} needs the package {package}, which is not installed; install rlpack[{package}] or unset {key}"
            )


def _line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of strict JSON; numbers that are not finite become texts."""
    return json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False) + "\n"


def _plain(value: Any) -> str | int | float:
    """Return a value that JSON can hold; NumPy and torch scalars become floats."""
    if isinstance(value, str | int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")
