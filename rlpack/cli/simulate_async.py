"""`rlpack simulate LENGTHS --async`: leads, and the ranks for training and for engines, from measured rates."""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.cli.error_text import print_error
from rlpack.cli.leads_of_run import lead_limit
from rlpack.cli.plan_options import OptionParser, check_number
from rlpack.cli.rates_of_run import RunRates, config_of, gpus_of, late_window, layout_divides, measured
from rlpack.cli.setup_keys import setup_keys
from rlpack.cli.tables import table
from rlpack.counted import counted
from rlpack.data.length_files import read_lengths
from rlpack.observe.run_dir import LENGTHS
from rlpack.packing.analysis.running_ahead import Rates, RunForecast, Setup, forecast_run, setups
from rlpack.packing.analysis.traces import MAX_ROWS, TRACES, trace
from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import MAX_LENGTH
from rlpack.packing.request import MAX_RANKS

FLAG = "--async"
_WRONG_ARGUMENTS, _WRONG_DATA = 2, 3
_TRACE_ROWS = 16_384
_LONGEST_LEAD, _LARGEST_LIMIT = 64, 1000
_DESCRIPTION = (
    "Forecast the steps per hour of runs that generate ahead (trainer.lead), for every lead and up to 15 splits of the "
    "ranks into engines and training, from the lengths and rates of a run."
)
# Add a note if an engine has this many times the responses that were measured.
_FURTHER = 1.25
# The steps of a forecast: fewer for large batches, each of which has enough responses for an average.
_LEAST_STEPS, _MOST_STEPS, _SIMULATED_ROWS = 15, 60, 16_000
# Option, type and help; the defaults are those of `Rates`.
_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("slots", int, "responses that an engine generates at once"),
    ("token-ms", float, "milliseconds per token of a response that is alone in its engine"),
    ("token-ms-per-response", float, "milliseconds per token that each other response in the engine adds"),
    ("train-tokens-per-s", float, "tokens per second that a rank trains on, prompts included"),
    ("publish-s", float, "seconds to publish weights to the engines"),
    ("prompt-tokens", float, "mean tokens per prompt"),
    ("rows-per-step", int, "responses per step"),
    ("score-s", float, "seconds from the last response of a batch to its last reward"),
)
_MAY_BE_ZERO = ("token-ms-per-response", "publish-s", "prompt-tokens", "score-s")


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
    parser = OptionParser(prog=f"rlpack simulate {FLAG}", ranks="8", description=_DESCRIPTION)
    parser.epilog = "With a run's directory, its lengths and rates are the defaults."
    parser.add_argument(FLAG, action="store_true", dest="is_async", help="forecast running ahead (trainer.lead)")
    parser.add_argument(
        "lengths",
        help="response lengths: a run's directory, .jsonl, .npy or .parquet, or a synthetic trace: "
        f"{', '.join(TRACES)}",
    )
    parser.add_argument("--column", help="column of the length in a .jsonl or .parquet file (default: length)")
    parser.add_argument("--longest", type=int, help="longest response of a synthetic trace (default: 8192)")
    parser.add_argument("--ranks", help="ranks in all, for training and engines (default: 8)")
    parser.add_argument("--leads", help="values of trainer.lead, separated by commas (default: 0,1,2,4)")
    parser.add_argument(
        "--max-staleness",
        help="leave out setups in which a token may be more than this many policy versions old (default: no limit)",
    )
    defaults = vars(Rates())
    for name, kind, meaning in _OPTIONS:
        default = defaults[_field(name)] * (1e3 if "ms" in name else 1)
        parser.add_argument(f"--{name}", type=kind, help=f"{meaning} (default: {default:g})")
    return parser


def _field(name: str) -> str:
    """Return the field of `Rates` that an option sets; one in milliseconds sets a field in seconds."""
    return name.replace("-", "_").replace("_ms", "_s")


def _simulate(given: argparse.Namespace) -> None:
    """Print the best split of each lead, and the best of all."""
    _check_numbers(given)
    limit = None
    if given.max_staleness is not None:
        limit = _whole_number("--max-staleness", given.max_staleness, 0, _LARGEST_LIMIT)
    measured_rates = _lengths_and_rates(given)
    lengths = measured_rates.lengths
    rates, ranks = _with_options(measured_rates.rates, given), _whole_number("--ranks", given.ranks, 2, MAX_RANKS)
    leads = _leads(given)
    print(_rates_line(lengths, rates))
    window = late_window(Path(given.lengths))
    if window > 1:
        print(
            f"trainer.late_groups.window={window} of the run is not simulated, but adds {window - 1} to the bound of "
            "setups with in_flight"
        )
    every = _setups(ranks, leads, Path(given.lengths))
    bounds = {_name(setup): _bound(setup, window) for setup in every}
    left_out = [] if limit is None else [name for name, bound in bounds.items() if bound > limit]
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, _SIMULATED_ROWS // rates.rows_per_step))
    best: dict[str, tuple[Setup, RunForecast]] = {}
    for setup in every:
        name = _name(setup)
        if name in left_out:
            continue
        found = forecast_run(lengths, rates, setup, steps=steps)
        if name not in best or found.step_s < best[name][1].step_s:
            best[name] = (setup, found)
    if not best:
        raise PackingError(f"no setup keeps --max-staleness {limit}; raise it, or include 0 in --leads")
    if left_out:
        texts = ", ".join(f"{name} (up to {bounds[name]})" for name in left_out)
        print(f"left out by --max-staleness {limit}: {texts}")
    header = ("setup", "engines", "training", "steps/h", "s a step", "training idle %", "engines idle %", "staleness")
    print(table(header, [_cells(setup, found, _bound(setup, window)) for setup, found in best.values()]))
    setup, found = min(best.values(), key=lambda one: one[1].step_s)
    for note in _notes(measured_rates, rates, setup, given=given):
        print(note)
    keys = setup_keys(setup, Path(given.lengths))
    print(f"best: {_name(setup)}, {3600 / found.step_s:,.0f} steps an hour: {keys}")


def _setups(ranks: int, leads: tuple[int, ...], run_dir: Path) -> list[Setup]:
    """Return the setups that the run's layout allows; how many are left out is printed.

    Raises:
        PackingError: there is none.
    """
    config = config_of(run_dir)
    every = list(setups(ranks, leads))
    divided = [setup for setup in every if layout_divides(config, setup.train_ranks)]
    if len(divided) < len(every):
        print(
            f"left out: {len(every) - len(divided)} of {len(every)} setups, whose training ranks the run's layout "
            "(actor.parallel) doesn't divide"
        )
    if not divided:
        raise PackingError(
            f"--ranks {ranks} leaves no setup that the run's layout (actor.parallel) allows; use another number of "
            "ranks, or other --leads"
        )
    return divided


def _check_numbers(given: argparse.Namespace) -> None:
    """Refuse numbers out of range.

    Raises:
        PackingError: names the option.
    """
    for name, _, _ in _OPTIONS:
        if (value := vars(given)[name.replace("-", "_")]) is not None:
            most = MAX_ROWS if name == "rows-per-step" else MAX_LENGTH
            check_number(f"--{name}", value, most, may_be_zero=name in _MAY_BE_ZERO)
    check_number("--longest", given.longest, may_be_zero=False)


def _leads(given: argparse.Namespace) -> tuple[int, ...]:
    """Return the leads to forecast, without those that the run's recipe refuses, which are printed.

    Raises:
        PackingError: a lead is not a number within the limits, or the recipe refuses all of them.
    """
    texts = (given.leads or "0,1,2,4").split(",")
    leads = tuple(dict.fromkeys(_whole_number("--leads", text, 0, _LONGEST_LEAD) for text in texts))
    limit = lead_limit(Path(given.lengths))
    if limit.longest is None:
        if limit.reason:
            print(limit.reason)
        return leads
    refused = ", ".join(f"{lead}" for lead in leads if lead > limit.longest)
    kept = tuple(lead for lead in leads if lead <= limit.longest)
    if not kept:
        raise PackingError(f"--leads has {refused}, but {limit.reason}; include {limit.longest}")
    if refused:
        print(f"left out: trainer.lead={refused}, because {limit.reason}")
    return kept


def _rates_line(lengths: np.ndarray, rates: Rates) -> str:
    """Return what the forecast is made from."""
    added_ms = 1e3 * rates.token_s_per_response
    return (
        f"responses of {lengths.mean():.0f} tokens on average, {int(lengths.max()):,} at most; "
        f"{rates.rows_per_step:,} a step; {rates.slots:,} at once in an engine, {1e3 * rates.token_s:.3g} ms a token"
        + (f" and {added_ms:.2g} more for each other response in the engine" if added_ms else "")
        + f"; training {rates.train_tokens_per_s:,.0f} tokens/s a rank; publication {rates.publish_s:.3g} s"
        + (f"; scoring {rates.score_s:.3g} s" if rates.score_s else "")
    )


def _notes(measured_rates: RunRates, rates: Rates, setup: Setup, *, given: argparse.Namespace) -> Iterator[str]:
    """Yield what the forecast of a setup assumes beyond the measurements.

    Args:
        measured_rates: what a run has measured.
        rates: the rates of the forecast.
        setup: the setup.
        given: the options, which replace measurements.
    """
    if measured_rates.train_ranks not in (None, setup.train_ranks) and given.train_tokens_per_s is None:
        yield (
            f"tokens/s a rank were measured on {counted(measured_rates.train_ranks, 'training rank')}, and are assumed "
            f"to be the same on {setup.train_ranks}; ranks that share cores or a network may be slower or faster, "
            "so compare with a short run of the setup"
        )
    if not measured_rates.has_exact_lengths:
        yield (
            f"response lengths are approximate, because {LENGTHS} of the run has only those of rows with their prompts"
            "; this version of rlpack stores those of responses, too, so a newer run gives them"
        )
    if measured_rates.hides_scoring and given.score_s is None:
        yield (
            "scoring that overlapped the log-prob pass of the run is not counted, because the run has no spans of it; "
            "with a lead, steps may take longer, so give --score-s"
        )
    if rates.scores_apart and rates.score_s and setup.publish == "drain" and setup.lead:
        yield (
            "scoring is assumed to overlap generation, because its roles have separate pools in the run; the overrides "
            "below keep them"
        )
    config = config_of(Path(given.lengths))
    gpus, of_training = gpus_of(config, "rollout"), gpus_of(config, "actor")
    if gpus > 1 and setup.lead:
        yield (
            f"setups have equally many ranks, but an engine has {gpus:g} GPUs, so those with more engines have more; "
            f"this one has {setup.engine_ranks * gpus + setup.train_ranks * of_training:g}"
        )
    elif gpus > of_training and not setup.lead and given.token_ms is None:
        yield (
            f"the time of a token was measured on engines with {counted(int(gpus), 'GPU')}; in turns, an engine has "
            f"only the {of_training:g} of a training rank, so give --token-ms"
        )
    if setup.publish == "in_flight" and given.token_ms is None and (config.get("rollout") or {}).get("engine") == "hf":
        yield "the time of a token was measured with rollout.engine=hf, but this setup needs vLLM; give --token-ms"
    responses = setup.responses_of_an_engine(rates)
    if measured_rates.most_responses is not None and responses > _FURTHER * measured_rates.most_responses:
        yield (
            f"the time of a token was measured with up to {counted(measured_rates.most_responses, 'response')} at a "
            f"time in an engine; this setup has up to {responses:,}, so compare with a short run of it"
        )


def _bound(setup: Setup, window: int) -> int:
    """Return how many policy versions old a token may be, however long responses take; see `Trainer.max_lag`."""
    return setup.lead + (window - 1 if setup.lead and setup.publish == "in_flight" else 0)


def _cells(setup: Setup, found: RunForecast, bound: int) -> list[str]:
    return [
        _name(setup),
        *(f"{setup.engine_ranks:,}", f"{setup.train_ranks:,}", f"{3600 / found.step_s:,.0f}", f"{found.step_s:.3g}"),
        *(f"{100 * found.training_idle:.0f}", f"{100 * found.engines_idle:.0f}"),
        f"{found.staleness_mean:.2f}, largest seen {found.staleness_max}, bound {bound}",
    ]


def _name(setup: Setup) -> str:
    return "in turns" if setup.lead == 0 else f"lead {setup.lead}, {setup.publish}"


def _lengths_and_rates(given: argparse.Namespace) -> RunRates:
    """Return response lengths, and rates measured in a run, or defaults."""
    path = Path(given.lengths)
    for name, is_useless in (("longest", given.lengths not in TRACES), ("column", path.suffix == "")):
        if is_useless and name in given.given:
            raise PackingError(f"--{name} has no effect on {given.lengths}; remove it")
    if given.lengths in TRACES:
        return RunRates(trace(given.lengths, _TRACE_ROWS, given.longest), Rates())
    if os.path.isdir(path):  # false for a name that no directory can have
        return measured(path, None if given.token_ms is None else given.token_ms / 1e3)
    if not os.path.exists(path) and not path.suffix:
        raise DataError(
            f"{path} is neither a file nor a synthetic trace; give a file of lengths, a run's directory, or one of "
            f"{', '.join(TRACES)}"
        )
    return RunRates(read_lengths(path, given.column), Rates())


def _with_options(rates: Rates, given: argparse.Namespace) -> Rates:
    """Return rates with the given options in place of measured ones."""
    values = {name: vars(given)[name.replace("-", "_")] for name, _, _ in _OPTIONS}
    chosen = {
        _field(name): value / 1e3 if "ms" in name else value for name, value in values.items() if value is not None
    }
    return replace(rates, **chosen)


def _whole_number(option: str, text: str, least: int, most: int) -> int:
    """Parse a number within limits.

    Raises:
        PackingError: it is not a whole number, or is outside the limits.
    """
    if not text.strip().isdecimal() or not least <= int(text) <= most:
        raise PackingError(f"{option} is {text}; it has to be a whole number from {least} to {most}")
    return int(text)
