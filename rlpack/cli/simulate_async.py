"""`rlpack simulate LENGTHS --async`: leads, and the ranks for training and for engines, from measured rates."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.cli.error_text import print_error
from rlpack.cli.plan_options import OptionParser
from rlpack.cli.tables import table
from rlpack.data.length_files import read_lengths
from rlpack.packing.analysis.running_ahead import (
    Rates,
    RunForecast,
    Setup,
    forecast_run,
    generation_over_longest,
    setups,
    with_mean,
)
from rlpack.packing.analysis.traces import TRACES, trace
from rlpack.packing.errors import PackingError
from rlpack.packing.request import MAX_RANKS

FLAG = "--async"
_WRONG_ARGUMENTS, _WRONG_DATA = 2, 3
_TRACE_ROWS = 16_384
_LONGEST_LEAD = 64
# A run's first steps, which load and compile.
_SKIPPED = 2
# Option, type and help; the defaults are those of `Rates`.
_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("slots", int, "responses that an engine generates at once"),
    ("token-ms", float, "milliseconds per token of each response in an engine"),
    ("train-tokens-per-s", float, "tokens per second that a rank trains on, prompts included"),
    ("publish-s", float, "seconds to publish weights to the engines"),
    ("prompt-tokens", float, "mean tokens per prompt"),
    ("rows-per-step", int, "responses per step"),
)


def simulate_async(arguments: Sequence[str]) -> int:
    """Print which leads and splits of the ranks take the fewest seconds per step, and return the exit code."""
    given = _parser().parse_args(list(arguments))
    try:
        _simulate(given)
    except DataError as error:
        print_error("simulate", str(error))
        return _WRONG_DATA
    except PackingError as error:
        print_error("simulate", str(error))
        return _WRONG_ARGUMENTS
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(prog=f"rlpack simulate {FLAG}", ranks="8")
    parser.epilog = "With a run's directory, its lengths and rates are the defaults."
    parser.add_argument(FLAG, action="store_true", dest="is_async", help="forecast running ahead (trainer.lead)")
    parser.add_argument(
        "lengths",
        help="response lengths: a run's directory, .jsonl, .npy or .parquet, or a synthetic trace: "
        f"{', '.join(TRACES)}",
    )
    parser.add_argument("--column", help="column of the length in a .jsonl or .parquet file (length)")
    parser.add_argument("--longest", type=int, help="longest response of a synthetic trace (8192)")
    parser.add_argument("--ranks", help="ranks in all, for training and engines (8)")
    parser.add_argument("--leads", help="values of trainer.lead, separated by commas (0,1,2,4)")
    parser.add_argument("--max-staleness", type=int, help="leave out setups with staler responses (no limit)")
    for name, kind, meaning in _OPTIONS:
        parser.add_argument(f"--{name}", type=kind, help=meaning)
    return parser


def _simulate(given: argparse.Namespace) -> None:
    """Print the best split of each lead, and the best of all."""
    lengths, measured = _lengths_and_rates(given)
    rates, ranks = _with_options(measured, given), _whole_number("--ranks", given.ranks, 2, MAX_RANKS)
    leads = tuple(_whole_number("--leads", text, 0, _LONGEST_LEAD) for text in (given.leads or "0,1,2,4").split(","))
    print(
        f"responses of {lengths.mean():.0f} tokens in the mean, {int(lengths.max()):,} at most; "
        f"{rates.rows_per_step:,} a step; {rates.slots:,} at once in an engine, {1e3 * rates.token_s:.3g} ms a token; "
        f"training {rates.train_tokens_per_s:,.0f} tokens/s a rank; publication {rates.publish_s:.3g} s"
    )
    best: dict[tuple[int, str], tuple[Setup, RunForecast]] = {}
    for setup in setups(ranks, tuple(dict.fromkeys(leads))):
        found = forecast_run(lengths, rates, setup)
        if given.max_staleness is not None and found.staleness_max > given.max_staleness:
            continue
        key = (setup.lead, setup.publish)
        if key not in best or found.step_s < best[key][1].step_s:
            best[key] = (setup, found)
    if not best:
        raise PackingError(f"no setup keeps --max-staleness {given.max_staleness}; raise it, or include 0 in --leads")
    header = ("setup", "engines", "training", "steps/h", "s a step", "training idle %", "engines idle %", "staleness")
    print(table(header, [_cells(setup, found) for setup, found in best.values()]))
    setup, found = min(best.values(), key=lambda one: one[1].step_s)
    print(f"best: {_name(setup)}, {3600 / found.step_s:,.0f} steps an hour: {_keys(setup)}")


def _cells(setup: Setup, found: RunForecast) -> list[str]:
    return [
        _name(setup),
        *(f"{setup.engine_ranks:,}", f"{setup.train_ranks:,}", f"{3600 / found.step_s:,.0f}", f"{found.step_s:.3g}"),
        *(f"{100 * found.training_idle:.0f}", f"{100 * found.engines_idle:.0f}"),
        f"{found.staleness_mean:.2f}, at most {found.staleness_max}",
    ]


def _name(setup: Setup) -> str:
    return "in turns" if setup.lead == 0 else f"lead {setup.lead}, {setup.publish}"


def _keys(setup: Setup) -> str:
    """Return the overrides of a setup."""
    if setup.lead == 0:
        return f"trainer.lead=0 placement.pools.main.ranks={setup.train_ranks}"
    publish = " rollout=vllm rollout.publish=in_flight" if setup.publish == "in_flight" else ""
    return (
        f"trainer.lead={setup.lead}{publish} placement=two_pools placement.pools.main.ranks={setup.train_ranks} "
        f"placement.pools.engines.ranks={setup.engine_ranks}"
    )


def _lengths_and_rates(given: argparse.Namespace) -> tuple[np.ndarray, Rates]:
    """Return response lengths, and rates measured in a run, or defaults."""
    path = Path(given.lengths)
    for name, is_useless in (("longest", given.lengths not in TRACES), ("column", path.suffix == "")):
        if is_useless and name in given.given:
            raise PackingError(f"--{name} has no effect on {given.lengths}; remove it")
    if given.lengths in TRACES:
        return trace(given.lengths, _TRACE_ROWS, given.longest), Rates()
    if path.is_dir():
        return measured_lengths_and_rates(path)
    if not path.exists() and not path.suffix:
        raise DataError(
            f"{path} is neither a file nor a synthetic trace; give a file of lengths, a run's directory, or one of "
            f"{', '.join(TRACES)}"
        )
    return read_lengths(path, given.column), Rates()


def measured_lengths_and_rates(run_dir: Path) -> tuple[np.ndarray, Rates]:
    """Return what a run has measured, its first steps left out.

    Raises:
        DataError: it has taken too few steps with generation.
    """
    from rlpack.cli.plan_from_run import read_record
    from rlpack.observe.run_dir import METRICS
    from rlpack.observe.sinks import read_records

    record = read_record(run_dir)
    steps = [
        one
        for one in read_records(run_dir / METRICS)
        if one["phase"] == "train" and one.get("rollout/response_tokens_max", 0) > 0
    ][_SKIPPED:]
    if not steps:
        raise DataError(f"{run_dir} has no more than {_SKIPPED} steps that generate; give a longer run, or lengths")
    rows = len(record.lengths)
    prompt = max(
        0.0,
        statistics.median(
            one.get("packing/real_tokens", 0.0) / rows - one["rollout/response_tokens_mean"] for one in steps
        ),
    )
    mean = statistics.fmean(one["rollout/response_tokens_mean"] for one in steps)
    responses = with_mean(np.maximum(1, np.asarray(record.lengths, dtype=np.int64) - round(prompt)), mean)
    slots, engines = _slots_and_engines(run_dir, rows)
    waits = ("time/drain_s",) if any("rollout/lag" in one for one in steps) else ("time/generate_s",)
    train_s = statistics.median(
        one["time/step_s"] - sum(one.get(name, 0.0) for name in (*waits, "time/sync_s")) for one in steps
    )
    tokens = _median(steps, "packing/real_tokens")
    rates = Rates(
        token_s=statistics.median(one["time/generate_s"] / one["rollout/response_tokens_max"] for one in steps)
        / generation_over_longest(responses, rows, slots * engines),
        slots=slots,
        train_tokens_per_s=tokens / max(train_s, 1e-9) / record.num_ranks,
        publish_s=_median(steps, "time/sync_s"),
        prompt_tokens=prompt,
        rows_per_step=rows,
    )
    return responses, rates


def _slots_and_engines(run_dir: Path, rows: int) -> tuple[int, int]:
    """Return how many responses an engine of a run generates at once, and the number of engines.

    Without the run's configuration, one engine that generates all of them.
    """
    from rlpack.observe.run_dir import read_config

    config = read_config(run_dir)
    try:
        pool = config["placement"]["roles"].get("rollout", "main")
        engines = int(config["placement"]["pools"][pool]["ranks"])
        return min(rows, int(config["rollout"]["max_num_seqs"])), engines
    except (KeyError, TypeError, ValueError, AttributeError):
        return rows, 1


def _median(steps: Sequence[dict[str, Any]], name: str) -> float:
    return float(statistics.median(one.get(name, 0.0) for one in steps))


def _with_options(rates: Rates, given: argparse.Namespace) -> Rates:
    """Return rates with the given options in place of measured ones."""
    chosen = {name.replace("-", "_"): vars(given)[name.replace("-", "_")] for name, _, _ in _OPTIONS}
    token_ms = chosen.pop("token_ms")
    if token_ms is not None:
        chosen["token_s"] = token_ms / 1e3
    return replace(rates, **{name: value for name, value in chosen.items() if value is not None})


def _whole_number(option: str, text: str, least: int, most: int) -> int:
    """Parse a number within limits.

    Raises:
        PackingError: it is none, or outside the limits.
    """
    if not text.strip().isdecimal() or not least <= int(text) <= most:
        raise PackingError(f"{option} is {text}; it has to be a whole number from {least} to {most}")
    return int(text)
