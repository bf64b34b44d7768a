"""`rlpack plan` and `rlpack simulate`: plans for a trace of lengths, without a model or a device."""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.cli.error_text import print_error
from rlpack.cli.plan_options import ALGORITHMS, MODES, PICTURES, check_options, rank_counts
from rlpack.cli.planned_lengths import grown_lengths, headline, planned_lengths
from rlpack.cli.tables import table
from rlpack.packing import (
    Algorithm,
    Batching,
    Cost,
    MicrobatchPlan,
    Mode,
    PackingError,
    warm_up_jit,
)
from rlpack.packing.analysis.calibration import calibrate
from rlpack.packing.analysis.data_rank import SINGLE_RANK
from rlpack.packing.analysis.shared_prompts import can_share_prompts, plan_rows
from rlpack.packing.analysis.simulation import LEAST_GAIN, MEMORY_MARGIN, Device, forecast, suggest
from rlpack.packing.analysis.traces import TRACES

WRONG_ARGUMENTS, WRONG_DATA = 2, 3
_FEW_ROWS = 4  # per rank
_TRUSTED_FIT = 0.5  # share of the variance that a fit has to explain
# Meanings of the columns of both commands.
_LEGEND = {
    "microbatches": "per rank",
    "waste %": "slots without a token",
    "tokens +%": "excess tokens of the fullest rank over the mean",
    "lock step +%": "longer step time because ranks synchronize at every microbatch",
    "idle %": "of the ranks' time, spent waiting for slower ranks",
    "time s": "modeled, forward and backward, all optimizer steps",
    "memory GB": "of the fullest rank: --fixed-gb and its largest microbatch",
    "tokens/s a rank": "without padding",
    "plan ms": "time to make the plan",
}
_PLAN_COLUMNS = ("microbatches", "waste %", "tokens +%", "lock step +%", "time s", "memory GB", "plan ms")
_SIMULATE_COLUMNS = ("microbatches", "waste %", "idle %", "time s", "memory GB", "tokens/s a rank")


def plan_command(arguments: argparse.Namespace) -> int:
    """Print how lengths would be batched, and return the exit code."""
    return _guarded("plan", arguments, _plan)


def simulate_command(arguments: argparse.Namespace) -> int:
    """Print expected step times on several cluster sizes, and return the exit code."""
    return _guarded("simulate", arguments, _simulate)


def _guarded(name: str, arguments: argparse.Namespace, run: object) -> int:
    assert callable(run)
    try:
        summary = _apply_run(arguments)
        check_options(arguments)
        if summary:
            print(f"{summary}; {_kilobytes(arguments):,.3g} kB of activations per slot (--kb-per-slot)")
        run(arguments)
    except DataError as error:
        print_error(name, str(error))
        return WRONG_DATA
    except PackingError as error:
        print_error(name, str(error))
        return WRONG_ARGUMENTS
    return 0


def _apply_run(arguments: argparse.Namespace) -> str:
    """Set options from the named run, if `lengths` is one, and return a line that lists them."""
    arguments.record = arguments.base = arguments.cost = arguments.prompts = None
    arguments.data_rank = SINGLE_RANK
    if arguments.lengths in TRACES or not os.path.isdir(arguments.lengths):  # false for too long a name
        return ""
    from rlpack.cli.plan_from_run import apply_record, read_record

    arguments.record = read_record(Path(arguments.lengths))
    return apply_record(arguments, arguments.record)


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.picture is not None:
        _check_picture(arguments.picture)
    lengths, cost = planned_lengths(arguments), _cost(arguments)
    device = _device(arguments)
    if arguments.fit:
        cost, device = _fitted(Path(arguments.lengths), device)
    choices = list(_choices(arguments))
    print(headline(lengths, arguments))
    warm_up_jit()
    rows, plans = [], {}
    for ranks in rank_counts(arguments.ranks):
        for name, batching in choices:
            start = time.perf_counter()
            plans[name] = plan = _plan_lengths(lengths, batching, ranks, arguments, cost)
            milliseconds = 1000 * (time.perf_counter() - start)
            rows.append([f"{ranks:,} × {name}", *_cells(_PLAN_COLUMNS, plan, cost, device, milliseconds)])
    _print_table(_PLAN_COLUMNS, rows, device)
    _print_idle_ranks(lengths, arguments)
    if arguments.suggest:
        for ranks in rank_counts(arguments.ranks):
            _print_suggestion(arguments, lengths, ranks, cost, device)
    if arguments.picture is not None:
        _draw(arguments, lengths, plans)


def _choices(arguments: argparse.Namespace) -> Iterator[tuple[str, Batching]]:
    """Yield the batchings to compare, by name."""
    if not arguments.compare:
        yield _named(_batching(arguments, arguments.mode, arguments.algorithm))
        return
    for algorithm in ALGORITHMS:
        yield _named(_batching(arguments, "packed", algorithm))
    for mode in MODES[1:]:
        yield _named(_batching(arguments, mode))


def _named(batching: Batching) -> tuple[str, Batching]:
    return (f"{batching.mode}, {batching.algorithm}" if batching.mode == "packed" else batching.mode), batching


def _plan_lengths(
    lengths: np.ndarray, batching: Batching, ranks: int, arguments: argparse.Namespace, cost: Cost | None = None
) -> MicrobatchPlan:
    prompts = None if arguments.prompts is None else arguments.prompts.repeated(lengths.size)
    return plan_rows(lengths, batching, prompts, dp_size=ranks, mini_batch_size=arguments.mini_batch_size, cost=cost)


def _cells(
    columns: tuple[str, ...], plan: MicrobatchPlan, cost: Cost, device: Device, milliseconds: float = 0.0
) -> list[str]:
    """Return the cells of one plan."""
    metrics, expected = plan.metrics, forecast(plan, cost, device)
    cells = {
        "microbatches": f"{expected.microbatches:,}",
        "waste %": f"{100 * expected.padding_share:.2f}",
        "tokens +%": f"{100 * metrics.rank_imbalance:.2f}",
        "lock step +%": f"{100 * metrics.lockstep_overhead:.2f}",
        "idle %": f"{100 * expected.idle_share:.1f}",
        "time s": _number(expected.step_s, 3),
        "memory GB": _number(expected.memory_bytes / 1e9, 1)
        + ("!" if expected.memory_bytes > device.memory_bytes else " "),
        "tokens/s a rank": f"{expected.tokens_per_s:,.0f}",
        "plan ms": f"{milliseconds:.1f}",
    }
    return [cells[column] for column in columns]


def _number(value: float, decimals: int) -> str:
    """Format a number with `decimals` decimals, or with four significant digits if it is below 1."""
    return f"{value:#.4g}" if 0 < value < 1 else f"{value:.{decimals}f}"


def _print_table(columns: tuple[str, ...], rows: list[list[str]], device: Device) -> None:
    """Print a table and the meanings of its columns."""
    print(table(["ranks × batching", *columns], rows))
    print()
    width = max(map(len, columns))
    for column in columns:
        print(f"{column.ljust(width)}  {_LEGEND[column]}")
    if any("!" in cell for row in rows for cell in row):
        print(f"{'!'.ljust(width)}  more than the {device.memory_bytes / 1e9:g} GB of a device (--memory-gb)")


def _print_idle_ranks(lengths: np.ndarray, arguments: argparse.Namespace) -> None:
    """Print how many ranks would get no sequence, or so few that every step waits for the longest one."""
    rows = min(lengths.size, arguments.mini_batch_size or lengths.size)
    for ranks in rank_counts(arguments.ranks):
        text = f"an optimizer step has {rows:,} sequences for {ranks:,} ranks"
        if rows < ranks:
            print(f"{text}: at least {ranks - rows:,} get none")
        elif rows < _FEW_ROWS * ranks and ranks > 1:
            more = " (--rows-per-rank grows them with the ranks)" if "rows_per_rank" in vars(arguments) else ""
            print(f"{text}, {rows / ranks:.3g} each: its time is that of the longest; give it more rows{more}")


def _print_suggestion(
    arguments: argparse.Namespace, lengths: np.ndarray, ranks: int, cost: Cost, device: Device
) -> None:
    best = suggest(
        lengths,
        _batching(arguments, arguments.mode, arguments.algorithm),
        dp_size=ranks,
        cost=cost,
        device=device,
        mini_batch_size=arguments.mini_batch_size,
        modes=(arguments.mode,) if "mode" in arguments.given else ("packed", "dynamic"),
        prompts=arguments.prompts,
    )
    batching, where = best.batching, f"on {ranks:,} ranks: "
    if not best.is_worth_it:
        print(f"{where}no suggestion: no alternative saves {LEAST_GAIN:.0%} of the modeled time")
        return
    keys = [f"batching.mode={batching.mode}"]
    if batching.mode == "packed":
        keys += [f"batching.algorithm={batching.algorithm}", f"batching.pad_to_multiple={batching.pad_to_multiple}"]
    else:
        keys += [f"batching.length_multiple={batching.length_multiple}"]
    if batching.mode == "fixed":
        keys += [f"batching.micro_batch_size={batching.micro_batch_size}"]
    if arguments.base is not None and arguments.base.share_prompts and not can_share_prompts(batching):
        keys += ["batching.share_prompts=false"]
    cp = arguments.data_rank.cp
    keys += [f"batching.max_tokens={'null' if batching.max_tokens is None else batching.max_tokens // cp}"]
    shared = f"a budget of each of the {cp} ranks of cp; " if cp > 1 and batching.max_tokens is not None else ""
    gain = "" if best.gain is None else f", {best.gain:.1%} less than the given options"
    print(
        f"{where}suggested: {' '.join(keys)} ({shared}{best.forecast.step_s:.3f} s{gain}; "
        f"{best.forecast.memory_bytes / 1e9:.1f} GB on the fullest rank, {MEMORY_MARGIN:.0%} of the memory next to "
        "--fixed-gb stays free)"
    )


def _fitted(run_dir: Path, device: Device) -> tuple[Cost, Device]:
    """Fit cost and device to the step times of a run."""
    if not run_dir.is_dir():
        raise PackingError(f"--fit needs a run's directory, but {run_dir} is not a directory")
    from rlpack.observe.run_dir import METRICS
    from rlpack.observe.sinks import read_records

    records = [record for record in read_records(run_dir / METRICS) if record["phase"] == "train"]
    names = ("packing/critical_slots", "packing/critical_squares", "packing/microbatches_per_rank", "time/update_s")
    steps = [[record[name] for name in names] for record in records if all(name in record for name in names)]
    fitted = calibrate(np.array(steps, dtype=np.float64).reshape(-1, len(names)))
    print(
        f"fitted on {len(steps)} steps of {run_dir}: {fitted.slot_s:.3g} s per slot, {fitted.square_s:.3g} s per "
        f"squared slot, {fitted.microbatch_s:.3g} s per microbatch; explains "
        f"{fitted.explained:.0%} of time/update_s's variance"
    )
    if fitted.explained < _TRUSTED_FIT:
        print(
            "so small a share means that the times below are not to be trusted: the steps differ too little in their "
            "lengths, or other work took the time"
        )
    return fitted.cost, replace(device, flops_per_s=1.0, overhead_s=fitted.microbatch_s)


def _check_picture(path: Path) -> None:
    """Refuse a picture that can't be written, and create its folder.

    Raises:
        PackingError: the format is unknown, or the file can't be written.
    """
    if path.suffix.removeprefix(".").lower() not in PICTURES:
        raise PackingError(f"--picture {path} ends in {path.suffix or 'nothing'}; give one of .{', .'.join(PICTURES)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()  # later steps may fail
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> PackingError:
    return PackingError(f"--picture {path} can't be written: {error.strerror or error}; choose another path")


def _draw(arguments: argparse.Namespace, lengths: np.ndarray, plans: dict[str, MicrobatchPlan]) -> None:
    """Draw the chosen plan, or one per mode, below a plan that is padded in arrival order."""
    from rlpack.observe.report.packing_picture import packing_picture

    (ranks,) = rank_counts(arguments.ranks)
    chosen = {
        name: plan
        for name, plan in plans.items()
        if plan.batching.mode != "packed" or plan.batching.algorithm == arguments.algorithm
    }
    fixed = chosen.pop("fixed", None) or _plan_lengths(lengths, _batching(arguments, "fixed"), ranks, arguments)
    pictures = {"fixed (padded, in arrival order)": fixed} | dict(reversed(chosen.items()))
    try:
        packing_picture(pictures, arguments.picture)
    except OSError as error:
        raise _unwritable(arguments.picture, error) from error
    print(f"picture of {'; '.join(pictures)}: {arguments.picture}")


def _simulate(arguments: argparse.Namespace) -> None:
    cost, device = _cost(arguments), _device(arguments)
    print(_assumptions(arguments))
    whole = None if arguments.rows_per_rank is not None else planned_lengths(arguments)
    if whole is not None:
        print(headline(whole, arguments))
    rows = []
    for ranks in rank_counts(arguments.ranks):
        lengths = grown_lengths(arguments, ranks) if whole is None else whole
        if whole is None:
            print(f"{ranks:,} ranks: {headline(lengths, arguments)}")
        for mode in MODES:
            plan = _plan_lengths(lengths, _batching(arguments, mode), ranks, arguments, cost)
            rows.append([f"{ranks:,} × {mode}", *_cells(_SIMULATE_COLUMNS, plan, cost, device)])
    _print_table(_SIMULATE_COLUMNS, rows, device)
    if whole is not None:
        _print_idle_ranks(whole, arguments)


def _assumptions(arguments: argparse.Namespace) -> str:
    """Return the model and the device that times and memory are computed for."""
    shape = f"hidden size {arguments.hidden_size:,}, {arguments.layers} layers"
    model = shape if arguments.cost is None else "the FLOPs of the run"
    text = (
        f"assuming {model}, {arguments.tflops:g} TFLOPS a device, "
        f"{arguments.overhead_ms:g} ms overhead a microbatch, {arguments.fixed_gb:g} GB fixed memory"
    )
    if arguments.fixed_gb == 0:
        text += "\nnote: memory counts only activations; add weights and optimizer states with --fixed-gb"
    return text


def _batching(arguments: argparse.Namespace, mode: Mode, algorithm: Algorithm = "best_fit_decreasing") -> Batching:
    """Return a batching that keeps all sequences: one over the budget gets its own microbatch.

    Its budget is that of all ranks that share a row, `--max-tokens` that of each.
    """
    batching = replace(
        arguments.base or Batching(),
        mode=mode,
        max_tokens=arguments.max_tokens * arguments.data_rank.cp,
        micro_batch_size=arguments.fixed_rows,
        algorithm=algorithm,
        pad_to_multiple=arguments.data_rank.aligned(arguments.pad_to_multiple),
        length_multiple=arguments.data_rank.aligned(arguments.length_multiple),
        overlong="own_microbatch",
        share_prompts=False,
    )
    if arguments.prompts is not None:
        batching = arguments.prompts.shared_in(batching)
    return replace(batching, max_tokens=None) if mode == "fixed" else batching


def _cost(arguments: argparse.Namespace) -> Cost:
    """Return the cost of the run's model, or of a dense decoder: 24·h²·L and, causal, 2·h·L² FLOPs per layer."""
    if arguments.cost is not None:
        return arguments.cost
    hidden, layers = arguments.hidden_size, arguments.layers
    return Cost(linear=24.0 * hidden * hidden * layers, quadratic=2.0 * hidden * layers)


def _kilobytes(arguments: argparse.Namespace) -> float:
    """Return what a slot keeps: 34 bytes × hidden size × layers (Korthikanti et al., 2022, arXiv:2205.05198)."""
    kilobytes, cost = arguments.kb_per_slot, arguments.cost
    if kilobytes is not None:
        return kilobytes
    if cost is not None and cost.quadratic > 0 and arguments.record.shape is None:
        # An older record: hidden size × layers, from 2·h·L² per layer, which holds if all layers have full attention.
        return 17.0 * cost.quadratic / 1e3
    return 34.0 * arguments.hidden_size * arguments.layers / 1e3


def _device(arguments: argparse.Namespace) -> Device:
    """Return the device of a rank, with the speed of all devices that work on the same rows."""
    rank = arguments.data_rank
    return Device(
        flops_per_s=arguments.tflops * 1e12 * rank.num_ranks,
        overhead_s=arguments.overhead_ms / 1e3,
        bytes_per_slot=_kilobytes(arguments) * 1e3 / rank.num_activation_ranks,
        fixed_bytes=arguments.fixed_gb * 1e9,
        memory_bytes=arguments.memory_gb * 1e9,
        cp=rank.cp,
    )
