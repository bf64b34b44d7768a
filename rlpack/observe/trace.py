"""`rlpack trace`: the spans of all processes of a run as one trace, in Chrome's JSON format, which Perfetto opens."""

import itertools
import json
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlpack.observe.errors import ReportError
from rlpack.safe_files import open_regular
from rlpack.spans import FOLDER
from rlpack.whole_files import write_whole

DRIVER, MAIN_THREAD = "driver", "MainThread"
_STEP = "train step "
# Shorter gaps between calls are the driver's own work between them.
_LEAST_IDLE_US = 1000

Kind = Literal["generation", "scoring", "log-probs", "update", "weights", "checkpoint", "other"]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("generate", "advance"), "generation"),
    "score": "scoring",
    **dict.fromkeys(("logprobs", "values", "kl_sums"), "log-probs"),
    "train_step": "update",
    **dict.fromkeys(
        ("export_bucket", "interrupt", "load_bucket", "publish", "resume", "canary_logprobs", "finish_transfer"),
        "weights",
    ),
    **dict.fromkeys(("save", "start_save", "save_is_done", "finish_save", "load"), "checkpoint"),
}


class Span(NamedTuple):
    """One activity of a thread.

    Attributes:
        name: name of the activity.
        begin_us: when it began, in microseconds since the epoch.
        duration_us: how long it took, in microseconds.
        thread: name of the thread.
    """

    name: str
    begin_us: int
    duration_us: int
    thread: str

    @property
    def end_us(self) -> int:
        """Return when it ended."""
        return self.begin_us + self.duration_us

    @property
    def kind(self) -> Kind:
        """Return the kind of role call that it is.

        >>> Span("actor.train_step", 0, 1, "MainThread").kind
        'update'
        """
        return _KINDS.get(self.name.rpartition(".")[2], "other")


class Values(NamedTuple):
    """Numbers that held over a period.

    Attributes:
        name: name of the quantities.
        begin_us: start of the period, in microseconds since the epoch.
        duration_us: length of the period, in microseconds.
        values: the numbers by name.
    """

    name: str
    begin_us: int
    duration_us: int
    values: dict[str, float]

    @property
    def end_us(self) -> int:
        """Return the end of the period."""
        return self.begin_us + self.duration_us

    def rates(self) -> dict[str, float]:
        """Return the numbers, with tokens converted to tokens per second.

        >>> Values("engine", 0, 500_000, {"running": 3.0, "tokens": 40}).rates()
        {'running': 3.0, 'tokens/s': 80.0}
        """
        rates = {name: value for name, value in self.values.items() if name != "tokens"}
        if "tokens" in self.values and self.duration_us > 0:
            rates["tokens/s"] = round(self.values["tokens"] / (self.duration_us / 1e6), 1)
        return rates


@dataclass(frozen=True)
class ProcessSpans:
    """The spans of one process.

    Attributes:
        process: `driver`, or pool and rank.
        pid: its process id on its host.
        host: name of its host.
        spans: spans sorted by start time, longer ones first.
        unreadable: lines that were cut off, which a killed process leaves.
        values: values sorted by start time.
    """

    process: str
    pid: int
    host: str
    spans: tuple[Span, ...]
    unreadable: int = 0
    values: tuple[Values, ...] = ()

    def outermost(self, thread: str) -> list[Span]:
        """Return the spans of a thread that are not inside another one, in order."""
        found: list[Span] = []
        for span in self.spans:
            if span.thread == thread and (not found or span.begin_us >= found[-1].end_us):
                found.append(span)
        return found


def read_spans(run_dir: Path, *, last_bytes: int | None = None) -> list[ProcessSpans]:
    """Return the spans of a run's processes: the driver first, then ranks by name.

    A run that was resumed has several processes of the same name.

    Args:
        run_dir: the run's directory.
        last_bytes: number of bytes to read from the end of each file; None for all.

    Raises:
        ReportError: there are none, or a file can't be read.
    """
    processes: dict[Path, ProcessSpans] = {}
    folder = run_dir / FOLDER
    # A name that no directory can have would raise.
    for path in sorted(folder.glob("*.jsonl")) if os.path.isdir(folder) else ():
        try:
            found = _read_file(path, last_bytes)
        except OSError as error:
            raise ReportError(f"{path} can't be read ({error}); delete it") from error
        if found is None:
            continue
        newest = path.with_name(path.name.replace(".old.jsonl", ".jsonl"))
        known = processes.get(newest)
        if known is not None:
            found = ProcessSpans(
                *(found.process, found.pid, found.host),
                _in_order([*known.spans, *found.spans]),
                known.unreadable + found.unreadable,
                tuple(sorted([*known.values, *found.values], key=lambda one: one.begin_us)),
            )
        processes[newest] = found
    if not processes:
        raise ReportError(f"{run_dir} contains no {FOLDER}/*.jsonl; give the directory of a run of `rlpack train`")
    return sorted(processes.values(), key=lambda one: (one.process != DRIVER, one.process, _begin(one)))


def train_steps(processes: Sequence[ProcessSpans]) -> list[Span]:
    """Return the steps of the recipe, as the driver recorded them, in order."""
    steps = [span for one in processes if one.process == DRIVER for span in one.spans if span.name.startswith(_STEP)]
    return sorted(steps, key=lambda step: step.begin_us)


def write_trace(run_dir: Path, path: Path, *, last_bytes: int | None = None) -> list[ProcessSpans]:
    """Write the trace of a run, and return its processes.

    Args:
        run_dir: the run's directory.
        path: file to write.
        last_bytes: see `read_spans`.

    Raises:
        ReportError: the run has no spans, or a file can't be read or written.
    """
    processes = read_spans(run_dir, last_bytes=last_bytes)
    try:
        write_whole(path, _texts(processes))
    except OSError as error:
        raise ReportError(f"the trace can't be written to {path}: {error}") from error
    return processes


def _texts(processes: Sequence[ProcessSpans]) -> Iterator[str]:
    """Yield the parts of a trace, event by event: a whole one may have gigabytes."""
    separator = '{"traceEvents": ['
    for event in _events(processes):
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "]}"


def _events(processes: Sequence[ProcessSpans]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: names of processes and threads, spans, when ranks were idle, and counters."""
    steps, names = train_steps(processes), Counter[str]()
    for number, one in enumerate(processes, start=1):
        names[one.process] += 1
        again = f" ({names[one.process]})" if names[one.process] > 1 else ""
        label = f"{one.process}{again}, process {one.pid} on {one.host}"
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        idle = [] if one.process == DRIVER else idle_spans(one, steps)
        for place, (name, spans) in enumerate(_tracks([*one.spans, *idle]).items(), start=1):
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": place, "args": {"name": name}}
            for span in spans:
                event = {"ph": "X", "name": span.name, "cat": span.kind, "ts": span.begin_us, "dur": span.duration_us}
                yield event | {"pid": number, "tid": place}
        yield from _counter_events(number, one.values)


def _tracks(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return spans by track, on which they follow or contain each other; viewers don't show others.

    The threads of batches that are drawn at the same time have one name, so that a name may have several tracks.
    """
    tracks: dict[str, list[Span]] = {}
    ends: dict[str, list[int]] = {}  # of the spans that contain the next one, the innermost last
    for span in sorted(spans, key=lambda one: (one.begin_us, -one.duration_us)):
        names = itertools.chain([span.thread], (f"{span.thread} ({count})" for count in itertools.count(2)))
        name = next(name for name in names if _has_room(ends.setdefault(name, []), span))
        ends[name].append(span.end_us)
        tracks.setdefault(name, []).append(span)
    return tracks


def _has_room(ends: list[int], span: Span) -> bool:
    """Return whether a span follows, or lies within, those of a track; `ends` loses the ends of those that are over."""
    while ends and ends[-1] <= span.begin_us:
        ends.pop()
    return not ends or span.end_us <= ends[-1]


def _counter_events(pid: int, values: Sequence[Values]) -> Iterator[dict[str, Any]]:
    """Yield the counters of a process; they are 0 while nothing was recorded."""
    ends: dict[str, Values] = {}
    for one in values:
        last = ends.get(one.name)
        if last is not None and one.begin_us > last.end_us:
            yield _counter_event(pid, last.name, last.end_us, dict.fromkeys(last.rates(), 0.0))
        yield _counter_event(pid, one.name, one.begin_us, one.rates())
        ends[one.name] = one
    for last in ends.values():
        yield _counter_event(pid, last.name, last.end_us, dict.fromkeys(last.rates(), 0.0))


def _counter_event(pid: int, name: str, time_us: int, values: Mapping[str, float]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "ts": time_us, "pid": pid, "args": dict(values)}


def idle_spans(process: ProcessSpans, steps: Sequence[Span]) -> list[Span]:
    """Return when a rank's main thread ran no call, within the steps; gaps under a millisecond are left out."""
    calls, idle = process.outermost(MAIN_THREAD), []
    if not calls:
        return []
    begins, ends = [call.begin_us for call in calls], [call.end_us for call in calls]  # both ascend: none overlap
    for step in steps:
        if step.begin_us > calls[-1].end_us or step.end_us < calls[0].begin_us:
            continue  # another process of this name ran then
        inside = calls[bisect_right(ends, step.begin_us) : bisect_left(begins, step.end_us)]
        borders = [step.begin_us, *(border for call in inside for border in (call.begin_us, call.end_us)), step.end_us]
        gaps = zip(borders[::2], borders[1::2], strict=True)
        idle += [Span("idle", begin, end - begin, MAIN_THREAD) for begin, end in gaps if end - begin >= _LEAST_IDLE_US]
    return idle


def _read_file(path: Path, last_bytes: int | None) -> ProcessSpans | None:
    """Return the spans in a file, or in its last bytes; None without a readable header."""
    spans: list[Span] = []
    values: list[Values] = []
    unreadable = 0
    with open_regular(path) as lines:
        try:
            value = json.loads(lines.readline())
            head = (str(value["process"]), int(value["pid"]), str(value["host"]))
        except (ValueError, TypeError, KeyError):
            return None
        if last_bytes is not None and path.stat().st_size - last_bytes > lines.tell():
            lines.seek(path.stat().st_size - last_bytes)
            lines.readline()  # the rest of a line
        for line in lines:
            try:
                name, begin, duration, content = json.loads(line)
                if isinstance(content, dict):
                    numbers = {str(key): float(value) for key, value in content.items()}
                    values.append(Values(str(name), int(begin), int(duration), numbers))
                else:
                    spans.append(Span(str(name), int(begin), int(duration), str(content)))
            except (ValueError, TypeError):
                unreadable += 1
    return ProcessSpans(*head, _in_order(spans), unreadable, tuple(sorted(values, key=lambda one: one.begin_us)))


def _in_order(spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: (span.begin_us, -span.duration_us)))


def _begin(process: ProcessSpans) -> int:
    return process.spans[0].begin_us if process.spans else 0
