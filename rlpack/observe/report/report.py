"""The report of a run: one self-contained HTML file that opens offline.

All text is escaped, model output included; a content security policy in the page forbids scripts and external sources.
"""

import base64
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from rlpack.batch.errors import DataError
from rlpack.config.hydra_text import as_argument
from rlpack.config.redaction import without_secrets
from rlpack.observe.errors import ReportError
from rlpack.observe.learning_signal import NUM_STEPS, lacks_signal, no_signal_text
from rlpack.observe.metric_entries import METRICS as METRIC_TABLE
from rlpack.observe.metric_entries import Metric
from rlpack.observe.report import plots
from rlpack.observe.report.engine_panel import EnginePanel, engine_figure
from rlpack.observe.report.packing_picture import packing_picture
from rlpack.observe.report.plan_record import TITLES, PlanRecord, read_plan
from rlpack.observe.report.plot_style import SETTINGS, svg
from rlpack.observe.report.step_times import StepTimes, time_by_part
from rlpack.observe.report.summary import summarize
from rlpack.observe.report.timeline import LAST_BYTES, Timeline, timeline_figure
from rlpack.observe.run_dir import (
    LENGTHS,
    LOG,
    METRICS,
    PICTURE,
    REPORT,
    SAMPLES,
    flat,
    holds_checkpoint,
    read_config,
    read_samples,
)
from rlpack.observe.run_end import RunEnd
from rlpack.observe.sinks import read_records
from rlpack.observe.text import shortened, visible
from rlpack.observe.trace import read_spans
from rlpack.path_suggestions import suggest_path

NUM_SAMPLES = 8
SAMPLE_CHARACTERS = 600
CONTENT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
CSS = """
:root { color-scheme: light; --ink: #1f2328; --faint: #59636e; --line: #d9dee3; --ground: #f6f8fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, 'DejaVu Sans', sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 2px 0 14px; color: var(--faint); }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 18px 22px; margin-top: 18px; }
.warning { border-left: 4px solid #bf8700; }
img { display: block; width: 100%; height: auto; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 18px; }
.card { flex: 1 1 215px; background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 21px; line-height: 1.3; white-space: nowrap; }
.card span { color: var(--faint); font-size: 13.5px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.45 ui-monospace, 'DejaVu Sans Mono', monospace; overflow-wrap: anywhere; }
.metrics { overflow-x: auto; } .metrics td:first-child { min-width: 170px; } .metrics code { overflow-wrap: normal; }
.metrics td:last-child, .metrics th:last-child { min-width: 240px; padding: 5px 0 5px 14px; }
.metrics tr.phase th { color: var(--ink); padding-top: 16px; }
pre { white-space: pre-wrap; margin: 2px 0 8px; } details summary { cursor: pointer; font-weight: 600; }
.sample { border-top: 1px solid var(--line); padding-top: 8px; margin-top: 8px; } .sample span { color: var(--faint); }
"""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and `packing.png`, and return the report's path.

    Raises:
        ReportError: the directory contains no run, or a file can't be read or written.
    """
    if not os.path.isdir(run_dir):  # false for a name that no directory can have
        raise ReportError(f"{run_dir} is not a directory{suggest_path(run_dir, folders_only=True)}; give that of a run")
    if not os.path.isfile(run_dir / METRICS):
        raise ReportError(f"{run_dir} contains no run, since it has no {METRICS}; give the directory of a run")
    try:
        return _write_report(run_dir)
    except DataError as error:
        raise ReportError(str(error)) from error
    except OSError as error:
        raise ReportError(
            f"the report of {run_dir} can't be written: {error.filename or run_dir}: {error.strerror or error}; change "
            "its permissions, or copy the run's directory"
        ) from error


def _write_report(run_dir: Path) -> Path:
    """Read the files of a run, and write its report."""
    records = list(read_records(run_dir / METRICS))
    config = without_secrets(read_config(run_dir))
    plans = read_plan(run_dir / LENGTHS)
    times = StepTimes.of(records)
    with matplotlib.rc_context(SETTINGS):
        sections = [
            _end_section(run_dir, records, config),
            _cards(records, plans),
            _signal_section(records),
            *_curve_sections(records),
            _packing_section(run_dir, plans),
            _figure_section("Time by part of a step", times.text(), time_by_part(times)),
            *_timeline_sections(run_dir),
            _figure_section("Training health", plots.health_text(records), plots.policy_health(records)),
            _figure_section(
                "Supervised warm-up", "Supervised steps before the first rollout.", plots.sft_warmup_loss(records)
            ),
        ]
    sections += [_samples_section(run_dir / SAMPLES), _metrics_section(records), _config_section(config)]
    path = run_dir / REPORT
    path.write_text(_page(run_dir, config, sections), encoding="utf-8")
    return path


def _page(run_dir: Path, config: dict[str, Any], sections: Sequence[str]) -> str:
    """Assemble the page."""
    name = _text(run_dir.resolve().name)
    facts = " · ".join(f"{key} {_text(value)}" for key, value in _facts(config).items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{name} · rlpack</title>'
        f"<style>{CSS}</style></head><body><main><h1>{name}</h1><p>rlpack run{' · ' + facts if facts else ''}</p>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    """Return recipe and seed, as far as the configuration has them."""
    recipe = config.get("recipe")
    facts = {"seed": config["seed"]} if "seed" in config else {}
    return {"recipe": str(recipe.get("target")).rpartition(".")[2], **facts} if isinstance(recipe, dict) else facts


def _cards(records: plots.Records, plans: PlanRecord | None) -> str:
    """Return the summary cards."""
    cards = "".join(
        f'<div class="card"><b>{_text(row.text)}</b><span>{_text(row.label)}</span></div>'
        for row in summarize(records, plans)
    )
    return f'<div class="cards">{cards}</div>'


def _end_section(run_dir: Path, records: plots.Records, config: dict[str, Any]) -> str:
    """Return how the run ended, unless it has finished."""
    end, trainer = RunEnd.read(run_dir), config.get("trainer")
    steps = trainer.get("steps") if isinstance(trainer, dict) else None
    taken = max((record["step"] for record in records if record["phase"] == "train"), default=0)
    place = f"after {taken:,} of {steps:,} training steps" if isinstance(steps, int) else f"after step {taken:,}"
    if end is None and isinstance(steps, int) and taken < steps:
        title, text = f"Not finished: {place}", "The run is in progress, or its process was killed."
    elif end is None or end.status == "finished":
        return ""
    else:
        title, text = f"{end.status.capitalize()} {place}", f"{end.error} (see {LOG})." if end.error else ""
    if holds_checkpoint(run_dir):
        argument = as_argument("run_dir", str(run_dir))
        text += f" To continue from the last checkpoint, start it with its overrides and {argument} resume=auto."
    return f'<section class="warning"><h2>{_text(title)}</h2><p>{_text(text)}</p></section>'


def _signal_section(records: plots.Records) -> str:
    """Return a warning if no training step had rewards to learn from."""
    steps = [record for record in records if record["phase"] == "train"]
    if len(steps) < NUM_STEPS or not all(map(lacks_signal, steps)):
        return ""
    text = _text(no_signal_text(steps))
    return f'<section class="warning"><h2>Nothing to learn from</h2><p>{text[:1].upper()}{text[1:]}.</p></section>'


def _curve_sections(records: plots.Records) -> Iterator[str]:
    """Yield the curves of rewards and of supervised losses, or a note if there are neither."""
    noun = plots.held_out_noun(records)
    title = f"Reward and held-out {noun}"
    reward, loss = plots.rewards(records), plots.supervised_loss(records)
    yield _figure_section(title, f"Held-out {noun} is measured on the whole validation split.", reward)
    yield _figure_section("Loss", "Held-out loss is measured on the demonstrations of the validation split.", loss)
    if reward is None and loss is None:
        yield f"<section><h2>{title}</h2><p>No reward and no evaluation were logged.</p></section>"


def _packing_section(run_dir: Path, plans: PlanRecord | None) -> str:
    """Draw the packing picture into the run directory, and return its section."""
    if plans is None:
        return ""
    own = plans.comparison()
    png = packing_picture(own, run_dir / PICTURE).read_bytes()
    of_part = "the first optimizer step of " if any(plan.num_steps > 1 for plan in own.values()) else ""
    text = (
        f"The sequences of {of_part}step {plans.step}, batched as in this run ({TITLES[plans.batching.mode]}) and in "
        "other modes. Each box is a microbatch, and its area is the number of token slots; each sequence has one color."
    )
    image = f'<img alt="packing picture" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    return f"<section><h2>Packing</h2><p>{_text(text)}</p>{image}</section>"


def _figure_section(title: str, text: str, figure: Figure | None) -> str:
    """Return a section with a figure; empty without one."""
    if figure is None:
        return ""
    # As an image, so that ids inside different SVGs can't clash.
    data = base64.b64encode(svg(figure).encode()).decode()
    image = f'<img alt="{_text(title)}" src="data:image/svg+xml;base64,{data}">'
    return f"<section><h2>{_text(title)}</h2><p>{_text(text)}</p>{image}</section>"


def _timeline_sections(run_dir: Path) -> Iterator[str]:
    """Yield the timeline of the last steps, and what engines did during them; nothing without spans."""
    try:
        processes = read_spans(run_dir, last_bytes=LAST_BYTES)
    except ReportError:
        return
    timeline = Timeline.of(processes)
    if timeline is None:
        return
    yield _figure_section("Timeline", timeline.text(), timeline_figure(timeline))
    panel = EnginePanel.of(timeline, processes)
    if panel is not None:
        yield _figure_section("Engines", panel.text(), engine_figure(panel))


def _samples_section(path: Path) -> str:
    """Return the last stored rollouts."""
    samples = read_samples(path)[-NUM_SAMPLES:]
    if not samples:
        return ""
    parts = []
    for sample in reversed(samples):
        head = f"step {sample.get('step')} · " + (
            "quarantined" if sample.get("reward") is None else f"reward {sample['reward']}"
        )
        head += f" · answer {sample['answer']}" if sample.get("answer") is not None else ""
        parts.append(
            f'<div class="sample"><span>{_text(head)}</span><pre>{_text(sample.get("prompt"))}</pre>'
            f"<pre><b>{_text(sample.get('completion'))}</b></pre></div>"
        )
    text = "The last stored rollouts, newest first; control characters are escaped."
    return f"<section><h2>Rollouts</h2><p>{text}</p>{''.join(parts)}</section>"


def _metrics_section(records: plots.Records) -> str:
    """Return a table of each metric's first, last, lowest, mean and highest value, phase by phase."""
    rows = []
    for phase in ("train", "evaluation", "sft_warmup"):
        of_phase = []
        names = dict.fromkeys(name for record in records if record["phase"] == phase for name in record)
        for name in (name for name in names if name not in {"step", "phase", "time_s"}):
            series = plots.Series.of(records, name, phase)
            if not len(series):
                continue
            metric = METRIC_TABLE.get(name)
            values = series.values
            numbers = (values[0], values[-1], values.min(), values.mean(), values.max())
            cells = "".join(f'<td class="n">{number:.4g}</td>' for number in numbers)
            meaning = _text(_meaning(metric)) if metric else ""
            of_phase.append(f"<tr><td><code>{_breakable(name)}</code></td>{cells}<td>{meaning}</td></tr>")
        if of_phase:
            rows += [f'<tr class="phase"><th>{phase}</th><th colspan="6"></th></tr>', *of_phase]
    heads = "".join(f'<th class="n">{head}</th>' for head in ("first", "last", "lowest", "mean", "highest"))
    table = f"<table><tr><th>metric</th>{heads}<th>meaning (unit)</th></tr>{''.join(rows)}</table>"
    return f'<section><details><summary>All metrics</summary><div class="metrics">{table}</div></details></section>'


def _config_section(config: dict[str, Any]) -> str:
    """Return the configuration, one key per line."""
    rows = "".join(
        f"<tr><td><code>{_text(key)}</code></td><td><code>{_text(value)}</code></td></tr>"
        for key, value in flat(config).items()
    )
    return f"<section><details><summary>Configuration</summary><table>{rows}</table></details></section>"


def _meaning(metric: Metric) -> str:
    return metric.description if metric.unit == "1" else f"{metric.description} ({metric.unit})"


def _breakable(name: str) -> str:
    """Return a metric's name as HTML text that may be broken after / and _."""
    return _text(name).replace("/", "/<wbr>").replace("_", "_<wbr>")


def _text(value: Any) -> str:
    """Return any value as HTML text of limited length."""
    return escape(visible(shortened(str(value), SAMPLE_CHARACTERS)))
