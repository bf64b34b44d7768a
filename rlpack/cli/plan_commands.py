"""`rlpack plan` and `rlpack simulate`: what batching makes of a trace of lengths, without a model or a device."""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.cli.plan_options import ALGORITHMS, MODES, PICTURES, check_options, rank_counts
from rlpack.cli.tables import table
from rlpack.data.length_files import read_lengths
from rlpack.packing import (
    Algorithm,
    Batching,
    Cost,
    MicrobatchPlan,
    Mode,
    PackingError,
    lower_bound,
    make_plan,
    warm_up_jit,
)
from rlpack.packing.analysis.calibration import calibrate
from rlpack.packing.analysis.simulation import LEAST_GAIN, MEMORY_MARGIN, Device, forecast, suggest
from rlpack.packing.analysis.traces import TRACES, trace
from rlpack.packing.lengths import align

WRONG_ARGUMENTS, WRONG_DATA = 2, 3
# What the columns of both commands hold.
_LEGEND = {
    "microbatches": "of each rank",
    "waste %": "slots without a token",
    "tokens +%": "how much more the fullest rank computes than the mean",
    "lock step +%": "how much longer a step takes because ranks meet at every microbatch",
    "idle %": "of the ranks' time, waiting for a slower rank",
    "time s": "modelled, forward and backward, all optimizer steps",
    "memory GB": "of the fullest rank: --fixed-gb and its largest microbatch",
    "tokens/s a rank": "real ones",
    "plan ms": "to make the plan",
}
_PLAN_COLUMNS = ("microbatches", "waste %", "tokens +%", "lock step +%", "time s", "memory GB", "plan ms")
_SIMULATE_COLUMNS = ("microbatches", "waste %", "idle %", "time s", "memory GB", "tokens/s a rank")


def plan_command(arguments: argparse.Namespace) -> int:
    """Show how lengths would be batched, and return the exit code."""
    return _guarded("plan", arguments, _plan)


def simulate_command(arguments: argparse.Namespace) -> int:
    """Show what steps would take on growing clusters, and return the exit code."""
    return _guarded("simulate", arguments, _simulate)


def _guarded(name: str, arguments: argparse.Namespace, run: object) -> int:
    assert callable(run)
    try:
        taken = _take_from_run(arguments)
        check_options(arguments)
        if taken:
            print(f"{taken}; {_device(arguments).bytes_per_slot / 1e3:,.3g} kB of activations a slot (--kb-per-slot)")
        run(arguments)
    except DataError as error:
        print(f"rlpack {name}: {error}", file=sys.stderr)
        return WRONG_DATA
    except PackingError as error:
        print(f"rlpack {name}: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS
    return 0


def _take_from_run(arguments: argparse.Namespace) -> str:
    """Take what was not given from the run that is named, if it is one, and return a line that says what."""
    arguments.record = arguments.base = arguments.cost = None
    if arguments.lengths in TRACES or not Path(arguments.lengths).is_dir():
        return ""
    from rlpack.cli.plan_from_run import read_record, take_over

    arguments.record = read_record(Path(arguments.lengths))
    return take_over(arguments, arguments.record)


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.picture is not None:
        _check_picture(arguments.picture)
    lengths, cost = _lengths(arguments), _cost(arguments)
    device = _device(arguments)
    if arguments.fit:
        cost, device = _fitted(Path(arguments.lengths), device)
    choices = list(_choices(arguments))
    print(_headline(lengths, arguments))
    warm_up_jit()
    rows, plans = [], {}
    for ranks in rank_counts(arguments.ranks):
        for name, batching in choices:
            began = time.perf_counter()
            plans[name] = plan = _made(lengths, batching, ranks, arguments, cost)
            milliseconds = 1000 * (time.perf_counter() - began)
            rows.append([f"{ranks:,} × {name}", *_cells(_PLAN_COLUMNS, plan, cost, device, milliseconds)])
    _print_table(_PLAN_COLUMNS, rows, device)
    _print_remarks(lengths, arguments)
    if arguments.suggest:
        for ranks in rank_counts(arguments.ranks):
            _print_suggestion(arguments, lengths, ranks, cost, device)
    if arguments.picture is not None:
        _draw(arguments, lengths, plans)


def _choices(arguments: argparse.Namespace) -> Iterator[tuple[str, Batching]]:
    """Yield the batchings that `plan` shows, by name."""
    if not arguments.compare:
        yield _named(_batching(arguments, arguments.mode, arguments.algorithm))
        return
    for algorithm in ALGORITHMS:
        yield _named(_batching(arguments, "packed", algorithm))
    for mode in MODES[1:]:
        yield _named(_batching(arguments, mode))


def _named(batching: Batching) -> tuple[str, Batching]:
    return (f"{batching.mode}, {batching.algorithm}" if batching.mode == "packed" else batching.mode), batching


def _made(
    lengths: np.ndarray, batching: Batching, ranks: int, arguments: argparse.Namespace, cost: Cost | None = None
) -> MicrobatchPlan:
    return make_plan(lengths, batching, dp_size=ranks, mini_batch_size=arguments.mini_batch_size, cost=cost)


def _cells(
    columns: tuple[str, ...], plan: MicrobatchPlan, cost: Cost, device: Device, milliseconds: float = 0.0
) -> list[str]:
    """Return the cells of one plan."""
    metrics, found = plan.metrics, forecast(plan, cost, device)
    cells = {
        "microbatches": f"{found.microbatches:,}",
        "waste %": f"{100 * found.padding_share:.2f}",
        "tokens +%": f"{100 * metrics.rank_imbalance:.2f}",
        "lock step +%": f"{100 * metrics.lockstep_overhead:.2f}",
        "idle %": f"{100 * found.idle_share:.1f}",
        "time s": f"{found.step_s:.3f}",
        "memory GB": f"{found.memory_bytes / 1e9:.1f}" + ("!" if found.memory_bytes > device.memory_bytes else " "),
        "tokens/s a rank": f"{found.tokens_per_s:,.0f}",
        "plan ms": f"{milliseconds:.1f}",
    }
    return [cells[column] for column in columns]


def _print_table(columns: tuple[str, ...], rows: list[list[str]], device: Device) -> None:
    """Print a table, and what its columns hold."""
    print(table(["ranks × batching", *columns], rows))
    print()
    width = max(map(len, columns))
    for column in columns:
        print(f"{column.ljust(width)}  {_LEGEND[column]}")
    if any("!" in cell for row in rows for cell in row):
        print(f"{'!'.ljust(width)}  more than the {device.memory_bytes / 1e9:g} GB of a device (--memory-gb)")


def _print_remarks(lengths: np.ndarray, arguments: argparse.Namespace) -> None:
    """Say which ranks have nothing to do."""
    rows = min(lengths.size, arguments.mini_batch_size or lengths.size)
    for ranks in rank_counts(arguments.ranks):
        if rows < ranks:
            print(f"{ranks:,} ranks share {rows:,} sequences of an optimizer step: at least {ranks - rows:,} have none")


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
    )
    found, there = best.batching, f"on {ranks:,} ranks: "
    if not best.is_worth_it:
        print(f"{there}no change worth making: nothing that was tried saves {LEAST_GAIN:.0%} of the modelled time")
        return
    keys = [f"batching.mode={found.mode}"]
    if found.mode == "packed":
        keys += [f"batching.algorithm={found.algorithm}", f"batching.pad_to_multiple={found.pad_to_multiple}"]
    else:
        keys += [f"batching.length_multiple={found.length_multiple}"]
    keys.append(
        f"batching.micro_batch_size={found.micro_batch_size}"
        if found.mode == "fixed"
        else f"batching.max_tokens={found.max_tokens}"
    )
    gain = "" if best.gain is None else f", {best.gain:.1%} less than as asked"
    print(
        f"{there}suggested: {' '.join(keys)} ({best.forecast.step_s:.3f} s{gain}; "
        f"{best.forecast.memory_bytes / 1e9:.1f} GB on the fullest rank, {MEMORY_MARGIN:.0%} of what is left beside "
        "--fixed-gb kept free)"
    )


def _fitted(run_dir: Path, device: Device) -> tuple[Cost, Device]:
    """Return cost and device by which the run's own steps took as long as they did."""
    if not run_dir.is_dir():
        raise PackingError(f"--fit needs a run's directory, and {run_dir} is none")
    from rlpack.observe.run_dir import METRICS
    from rlpack.observe.sinks import read_records

    records = [record for record in read_records(run_dir / METRICS) if record["phase"] == "train"]
    names = ("packing/critical_slots", "packing/critical_squares", "packing/microbatches_per_rank", "time/update_s")
    steps = [[record[name] for name in names] for record in records if all(name in record for name in names)]
    found = calibrate(np.array(steps, dtype=np.float64).reshape(-1, len(names)))
    print(
        f"fitted on {len(steps)} steps of {run_dir}: {found.slot_s:.3g} s a slot, {found.square_s:.3g} s a squared "
        f"slot, {found.microbatch_s:.3g} s a microbatch; explains {found.explained:.0%} of time/update_s's variance"
    )
    return found.cost, replace(device, flops_per_s=1.0, overhead_s=found.microbatch_s)


def _check_picture(path: Path) -> None:
    """Refuse a picture that can't be written, and make its folder.

    Raises:
        PackingError: it is of no known kind, or there is no place for it.
    """
    if path.suffix.removeprefix(".").lower() not in PICTURES:
        raise PackingError(f"--picture {path} ends in {path.suffix or 'nothing'}; give one of .{', .'.join(PICTURES)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()  # what follows may fail
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> PackingError:
    return PackingError(f"--picture {path} can't be written: {error.strerror or error}; name another place")


def _draw(arguments: argparse.Namespace, lengths: np.ndarray, plans: dict[str, MicrobatchPlan]) -> None:
    """Draw the plan that was chosen, or one of each mode, and above it what padding in arrival order would take."""
    from rlpack.observe.report.packing_picture import packing_picture

    (ranks,) = rank_counts(arguments.ranks)
    chosen = {
        name: plan
        for name, plan in plans.items()
        if plan.batching.mode != "packed" or plan.batching.algorithm == arguments.algorithm
    }
    fixed = chosen.pop("fixed", None) or _made(lengths, _batching(arguments, "fixed"), ranks, arguments)
    drawn = {"fixed (padded, in arrival order)": fixed} | dict(reversed(chosen.items()))
    try:
        packing_picture(drawn, arguments.picture)
    except OSError as error:
        raise _unwritable(arguments.picture, error) from error
    print(f"picture of {'; '.join(drawn)}: {arguments.picture}")


def _simulate(arguments: argparse.Namespace) -> None:
    cost, device = _cost(arguments), _device(arguments)
    whole = None if arguments.rows_per_rank is not None else _lengths(arguments)
    if whole is not None:
        print(_headline(whole, arguments))
    rows = []
    for ranks in rank_counts(arguments.ranks):
        lengths = _grown(arguments, ranks) if whole is None else whole
        if whole is None:
            print(f"{ranks:,} ranks: {_headline(lengths, arguments)}")
        for mode in MODES:
            plan = _made(lengths, _batching(arguments, mode), ranks, arguments, cost)
            rows.append([f"{ranks:,} × {mode}", *_cells(_SIMULATE_COLUMNS, plan, cost, device)])
    _print_table(_SIMULATE_COLUMNS, rows, device)
    if whole is not None:
        _print_remarks(whole, arguments)


def _grown(arguments: argparse.Namespace, ranks: int) -> np.ndarray:
    """Return as many lengths as `--rows-per-rank` asks for: of a longer trace, or those of a file again and again."""
    count = ranks * arguments.rows_per_rank
    if arguments.lengths in TRACES:
        return trace(arguments.lengths, count, arguments.longest, seed=arguments.seed)
    return np.resize(_lengths(arguments), count)


def _headline(lengths: np.ndarray, arguments: argparse.Namespace) -> str:
    aligned = align(lengths, arguments.pad_to_multiple)
    fits = aligned[aligned <= arguments.max_tokens]
    bound = lower_bound(fits, arguments.max_tokens) + int((aligned > arguments.max_tokens).sum())
    steps = -(-lengths.size // (arguments.mini_batch_size or lengths.size))
    text = (
        f"{lengths.size:,} sequences, {int(lengths.sum()):,} tokens, mean {lengths.mean():.0f}, longest "
        f"{int(lengths.max()):,}; a budget of {arguments.max_tokens:,} needs at least {bound:,} microbatches"
    )
    if steps > 1:
        text += f"; figures are of all {steps:,} optimizer steps together"
    if over := int((aligned > arguments.max_tokens).sum()):
        text += (
            f"\n{over:,} sequences are over the budget: each has a microbatch of its own here, above the budget; "
            "training refuses them unless batching.overlong says what to do"
        )
    return text


def _lengths(arguments: argparse.Namespace) -> np.ndarray:
    """Return the lengths that the command is about."""
    if arguments.lengths in TRACES:
        return trace(arguments.lengths, arguments.rows, arguments.longest, seed=arguments.seed)
    path = Path(arguments.lengths)
    if arguments.record is not None:
        return np.asarray(arguments.record.lengths, dtype=np.int64)
    if not path.exists() and not path.suffix:
        raise DataError(
            f"there is no file {path}, and no synthetic trace of this name; give a file of lengths, a run's directory, "
            f"or one of {', '.join(TRACES)}"
        )
    return read_lengths(path, arguments.column)


def _batching(arguments: argparse.Namespace, mode: Mode, algorithm: Algorithm = "best_fit_decreasing") -> Batching:
    """Return a batching in which a sequence over the budget gets a microbatch of its own: nothing is left out."""
    batching = replace(
        arguments.base or Batching(),
        mode=mode,
        max_tokens=arguments.max_tokens,
        micro_batch_size=arguments.fixed_rows,
        algorithm=algorithm,
        pad_to_multiple=arguments.pad_to_multiple,
        length_multiple=arguments.length_multiple,
        overlong="own_microbatch",
    )
    return replace(batching, max_tokens=None) if mode == "fixed" else batching


def _cost(arguments: argparse.Namespace) -> Cost:
    """Return the FLOPs of the run's own model, or of a dense decoder: 24·h²·L and, causal, 2·h·L² a layer."""
    if arguments.cost is not None:
        return arguments.cost
    hidden, layers = arguments.hidden_size, arguments.layers
    return Cost(linear=24.0 * hidden * hidden * layers, quadratic=2.0 * hidden * layers)


def _device(arguments: argparse.Namespace) -> Device:
    """Return the device; a slot keeps 34 bytes × hidden size × layers (Korthikanti et al., 2022, arXiv:2205.05198)."""
    kilobytes = arguments.kb_per_slot
    if kilobytes is None and arguments.cost is not None and arguments.cost.quadratic > 0:
        kilobytes = 17.0 * arguments.cost.quadratic / 1e3  # whose 2·h·L² a layer tell hidden size × layers
    elif kilobytes is None:
        kilobytes = 34.0 * arguments.hidden_size * arguments.layers / 1e3
    return Device(
        flops_per_s=arguments.tflops * 1e12,
        overhead_s=arguments.overhead_ms / 1e3,
        bytes_per_slot=kilobytes * 1e3,
        fixed_bytes=arguments.fixed_gb * 1e9,
        memory_bytes=arguments.memory_gb * 1e9,
    )
