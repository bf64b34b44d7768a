"""`rlpack plan` and `rlpack simulate`: what batching makes of a trace of lengths, without a model or a device."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from rlpack.cli.tables import table
from rlpack.data.errors import DataError
from rlpack.data.lengths import read_lengths
from rlpack.packing import Algorithm, Batching, Cost, MicrobatchPlan, Mode, PackingError, lower_bound, make_plan, warm
from rlpack.packing.fitting import fit
from rlpack.packing.lengths import align
from rlpack.packing.planning import MAX_RANKS
from rlpack.packing.simulation import Device, forecast, suggest
from rlpack.packing.traces import TRACES, trace

WRONG_ARGUMENTS, WRONG_DATA = 2, 3
MODES: tuple[Mode, ...] = get_args(Mode)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


def add_arguments(plan: argparse.ArgumentParser, simulate: argparse.ArgumentParser) -> None:
    """Declare the arguments of both commands."""
    for parser in (plan, simulate):
        parser.add_argument(
            "lengths",
            help=f".jsonl, .npy or .parquet of lengths, a run's directory, or a synthetic trace: {', '.join(TRACES)}",
        )
        parser.add_argument("--column", default="length", help="where a row of the file holds its length (%(default)s)")
        parser.add_argument("--rows", type=int, default=16384, help="rows of a synthetic trace (%(default)s)")
        parser.add_argument("--longest", type=int, default=8192, help="its longest row (%(default)s)")
        parser.add_argument("--seed", type=int, default=0, help="its seed (%(default)s)")
        parser.add_argument("--max-tokens", type=int, default=16384, help="token budget (%(default)s)")
        parser.add_argument("--mini-batch-size", type=int, help="rows of an optimizer step (all)")
        parser.add_argument("--pad-to-multiple", type=int, default=1, help="alignment of packed rows (%(default)s)")
        parser.add_argument("--length-multiple", type=int, default=1, help="alignment of padded widths (%(default)s)")
        parser.add_argument("--fixed-rows", type=int, default=16, help="rows of a fixed microbatch (%(default)s)")
        parser.add_argument("--hidden-size", type=int, default=4096, help="of the model (%(default)s)")
        parser.add_argument("--layers", type=int, default=32, help="of the model (%(default)s)")
        parser.add_argument("--tflops", type=float, default=400.0, help="a device sustains (%(default)s)")
        parser.add_argument("--overhead-ms", type=float, default=10.0, help="every microbatch takes (%(default)s)")
        parser.add_argument("--memory-gb", type=float, default=80.0, help="of a device (%(default)s)")
        parser.add_argument("--fixed-gb", type=float, default=0.0, help="weights and optimizer on it (%(default)s)")
        parser.add_argument(
            "--kb-per-slot", type=float, help="activations that a token slot keeps (34 bytes × hidden size × layers)"
        )
    plan.add_argument("--ranks", type=int, default=8, help="data-parallel ranks (%(default)s)")
    plan.add_argument("--mode", choices=MODES, default="packed")
    plan.add_argument("--algorithm", choices=ALGORITHMS, default="best_fit_decreasing")
    plan.add_argument("--compare", action="store_true", help="show all algorithms and modes")
    plan.add_argument("--suggest", action="store_true", help="search mode, budget and alignment for the least time")
    plan.add_argument("--fit", action="store_true", help="take times from the steps of the run that is named")
    plan.add_argument("--picture", type=Path, metavar="PNG", help="draw the first optimizer step")
    simulate.add_argument("--ranks", default="8,64,512", help="numbers of ranks, with commas (%(default)s)")


def plan_command(arguments: argparse.Namespace) -> int:
    """Show how lengths would be batched, and return the exit code."""
    return _guarded("plan", arguments, _plan)


def simulate_command(arguments: argparse.Namespace) -> int:
    """Show what steps would take on growing clusters, and return the exit code."""
    return _guarded("simulate", arguments, _simulate)


def _guarded(name: str, arguments: argparse.Namespace, run: object) -> int:
    assert callable(run)
    try:
        _check_options(arguments)
        run(arguments)
    except DataError as error:
        print(f"rlpack {name}: {error}", file=sys.stderr)
        return WRONG_DATA
    except PackingError as error:
        print(f"rlpack {name}: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse numbers that nothing can be computed with, by the names that the user knows.

    Raises:
        PackingError: one is out of its range.
    """
    ranks = arguments.ranks if isinstance(arguments.ranks, str) else str(arguments.ranks)
    for count in _ranks(ranks):
        if not 1 <= count <= MAX_RANKS:
            raise PackingError(f"--ranks is {count}; it has to be from 1 to {MAX_RANKS}")
    for name in ("tflops", "memory_gb", "hidden_size", "layers"):
        value = vars(arguments)[name]
        if value <= 0:
            raise PackingError(f"--{name.replace('_', '-')} is {value:g}; it has to be above 0")
    if arguments.fixed_gb >= arguments.memory_gb:
        raise PackingError(
            f"--fixed-gb is {arguments.fixed_gb:g}, and --memory-gb {arguments.memory_gb:g} leaves nothing for "
            "activations; lower the one or raise the other"
        )


def _plan(arguments: argparse.Namespace) -> None:
    lengths, cost = _lengths(arguments), _cost(arguments)
    device = _device(arguments)
    if arguments.fit:
        cost, device = _fitted(Path(arguments.lengths), device)
    chosen = _batching(arguments, arguments.mode, arguments.algorithm)
    choices = [chosen]
    if arguments.compare:
        choices = [_batching(arguments, "packed", algorithm) for algorithm in ALGORITHMS]
        choices += [_batching(arguments, mode) for mode in MODES[1:]]
    print(_headline(lengths, arguments))
    warm()
    rows, plans = [], {}
    for batching in choices:
        name = f"{batching.mode}, {batching.algorithm}" if batching.mode == "packed" else batching.mode
        began = time.perf_counter()
        plans[name] = make_plan(
            lengths, batching, dp_size=arguments.ranks, mini_batch_size=arguments.mini_batch_size, cost=cost
        )
        rows.append([name, *_figures(plans[name], 1000 * (time.perf_counter() - began), cost, device)])
    print(table(["batching", "microbatches", "waste %", "tokens +%", "lock step +%", "time s", "plan ms"], rows))
    if arguments.suggest:
        _print_suggestion(arguments, lengths, cost, device)
    if arguments.picture is not None:
        _draw(arguments, lengths, plans)


def _figures(plan: MicrobatchPlan, milliseconds: float, cost: Cost, device: Device) -> list[str]:
    """Return the cells of one plan."""
    metrics = plan.metrics
    return [
        str(plan.counts.shape[1]),
        f"{100 * metrics.waste_ratio:.2f}",
        f"{100 * metrics.rank_imbalance:.2f}",
        f"{100 * metrics.lockstep_overhead:.2f}",
        f"{forecast(plan, cost, device).step_s:.3f}",
        f"{milliseconds:.1f}",
    ]


def _print_suggestion(arguments: argparse.Namespace, lengths: np.ndarray, cost: Cost, device: Device) -> None:
    best = suggest(
        lengths,
        _batching(arguments, "packed", arguments.algorithm),
        dp_size=arguments.ranks,
        cost=cost,
        device=device,
        mini_batch_size=arguments.mini_batch_size,
    )
    found = best.batching
    alignment = "pad_to_multiple" if found.mode == "packed" else "length_multiple"
    multiple = found.pad_to_multiple if found.mode == "packed" else found.length_multiple
    print(
        f"suggested: batching.mode={found.mode} batching.max_tokens={found.max_tokens} batching.{alignment}={multiple} "
        f"({best.forecast.step_s:.3f} s, {best.forecast.memory_bytes / 1e9:.1f} GB on a rank)"
    )


def _fitted(run_dir: Path, device: Device) -> tuple[Cost, Device]:
    """Return cost and device by which the run's own steps took as long as they did."""
    if not run_dir.is_dir():
        raise PackingError(f"--fit needs a run's directory, and {run_dir} is none")
    from rlpack.observe.directory import METRICS
    from rlpack.observe.sinks import read_records

    records = [record for record in read_records(run_dir / METRICS) if record["phase"] == "train"]
    names = ("packing/critical_slots", "packing/critical_squares", "packing/microbatches_per_rank", "time/update_s")
    steps = [[record[name] for name in names] for record in records if all(name in record for name in names)]
    found = fit(np.array(steps, dtype=np.float64).reshape(-1, len(names)))
    print(
        f"fitted on {len(steps)} steps of {run_dir}: {found.slot_s:.3g} s a slot, {found.square_s:.3g} s a squared "
        f"slot, {found.microbatch_s:.3g} s a microbatch; explains {found.explained:.0%} of time/update_s's variance"
    )
    return found.cost, replace(device, flops_per_s=1.0, overhead_s=found.microbatch_s)


def _draw(arguments: argparse.Namespace, lengths: np.ndarray, plans: dict[str, MicrobatchPlan]) -> None:
    """Draw the chosen plan, and above it what padding in arrival order would take."""
    from rlpack.observe.packing_picture import packing_picture

    name = f"packed, {arguments.algorithm}" if arguments.mode == "packed" else arguments.mode
    fixed = make_plan(
        lengths, _batching(arguments, "fixed"), dp_size=arguments.ranks, mini_batch_size=arguments.mini_batch_size
    )
    plans = {"fixed (padded, in arrival order)": fixed} | ({} if name == "fixed" else {name: plans[name]})
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    print(f"picture: {packing_picture(plans, arguments.picture)}")


def _simulate(arguments: argparse.Namespace) -> None:
    lengths, cost, device = _lengths(arguments), _cost(arguments), _device(arguments)
    batchings = [_batching(arguments, mode) for mode in MODES]
    print(_headline(lengths, arguments))
    rows = []
    for ranks in _ranks(arguments.ranks):
        for batching in batchings:
            plan = make_plan(lengths, batching, dp_size=ranks, mini_batch_size=arguments.mini_batch_size, cost=cost)
            found = forecast(plan, cost, device)
            rows.append(
                [
                    f"{ranks:,} × {batching.mode}",
                    f"{found.step_s:.3f}",
                    f"{100 * found.idle_share:.1f}",
                    f"{100 * found.padding_share:.1f}",
                    f"{found.memory_bytes / 1e9:.1f}" + (" !" if found.memory_bytes > device.memory_bytes else ""),
                    str(found.microbatches),
                    f"{found.tokens_per_s:,.0f}",
                ]
            )
    header = ["ranks × mode", "time s", "idle %", "padding %", "memory GB", "microbatches", "tokens/s a rank"]
    print(table(header, rows))
    if any("!" in row[4] for row in rows):
        print(f"! more than the {device.memory_bytes / 1e9:g} GB of a device")


def _ranks(text: str) -> Sequence[int]:
    """Return the numbers of ranks that a list with commas names."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise PackingError(f"--ranks is {text!r}; give whole numbers with commas, such as 8,64,512") from error


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
    if path.is_dir():
        from rlpack.observe.directory import LENGTHS
        from rlpack.observe.plan_record import read_plan

        record = read_plan(path / LENGTHS)
        if record is None:
            raise DataError(f"{path} holds no {LENGTHS}; give a run's directory, or a file of lengths")
        return np.asarray(record.lengths, dtype=np.int64)
    if not path.exists() and not path.suffix:
        raise DataError(
            f"there is no file {path}, and no synthetic trace of this name; give a file of lengths, a run's directory, "
            f"or one of {', '.join(TRACES)}"
        )
    return read_lengths(path, arguments.column)


def _batching(arguments: argparse.Namespace, mode: Mode, algorithm: Algorithm = "best_fit_decreasing") -> Batching:
    """Return a batching in which a sequence over the budget gets a microbatch of its own: nothing is left out."""
    batching = Batching(
        mode=mode,
        max_tokens=arguments.max_tokens,
        rows=arguments.fixed_rows,
        algorithm=algorithm,
        pad_to_multiple=arguments.pad_to_multiple,
        length_multiple=arguments.length_multiple,
        overlong="own_microbatch",
    )
    return replace(batching, max_tokens=None) if mode == "fixed" else batching


def _cost(arguments: argparse.Namespace) -> Cost:
    """Return the FLOPs of a dense decoder: 24·h²·L and, causal, 2·h·L² a layer."""
    hidden, layers = arguments.hidden_size, arguments.layers
    return Cost(linear=24.0 * hidden * hidden * layers, quadratic=2.0 * hidden * layers)


def _device(arguments: argparse.Namespace) -> Device:
    """Return the device; a slot keeps 34 bytes × hidden size × layers (Korthikanti et al., 2022, arXiv:2205.05198)."""
    kilobytes = arguments.kb_per_slot
    if kilobytes is None:
        kilobytes = 34.0 * arguments.hidden_size * arguments.layers / 1e3
    return Device(
        flops_per_s=arguments.tflops * 1e12,
        overhead_s=arguments.overhead_ms / 1e3,
        bytes_per_slot=kilobytes * 1e3,
        fixed_bytes=arguments.fixed_gb * 1e9,
        memory_bytes=arguments.memory_gb * 1e9,
    )
