"""Options of `rlpack plan` and `rlpack simulate`, and which combinations are valid.

Options have no defaults in the parser, so that given options can be told from defaults: an option without effect is
refused, because its user expects an effect.
"""

import argparse
import difflib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from rlpack.packing import Algorithm, Mode, PackingError
from rlpack.packing.analysis.traces import MAX_ROWS, TRACES
from rlpack.packing.lengths import MAX_LENGTH
from rlpack.packing.request import MAX_RANKS

MODES: tuple[Mode, ...] = get_args(Mode)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
PICTURES = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "tiff")
_WRONG_ARGUMENTS = 2

# Name, default, type and help of the options of both commands.
_OPTIONS: tuple[tuple[str, Any, type, str], ...] = (
    ("rows", 16384, int, "rows of a synthetic trace"),
    ("longest", 8192, int, "longest row of a synthetic trace"),
    ("seed", 0, int, "seed of a synthetic trace"),
    ("max_tokens", 16384, int, "token budget of packed and dynamic microbatches"),
    ("pad_to_multiple", 1, int, "alignment of packed rows"),
    ("length_multiple", 1, int, "alignment of padded widths"),
    ("fixed_rows", 16, int, "rows of a fixed microbatch, which has no token budget"),
    ("hidden_size", 4096, int, "hidden size of the model"),
    ("layers", 32, int, "number of layers of the model"),
    ("tflops", 400.0, float, "sustained TFLOPS of a device"),
    ("overhead_ms", 10.0, float, "overhead of each microbatch, in ms"),
    ("memory_gb", 80.0, float, "memory of a device, in GB"),
    ("fixed_gb", 0.0, float, "part of that for weights and optimizer state, in GB"),
)
_PLAN = (
    "Show how given sequence lengths would be batched, and the modeled time of a step. Given overrides of `rlpack "
    "train` instead of lengths, rlpack plan --suggest key=value ... lists layouts and memory switches that fit, "
    "fastest first."
)
_SIMULATE = (
    "Compare the modeled step times of packed, dynamic and fixed batching for given sequence lengths, also on more "
    "ranks than you have."
)
_ABOVE_ZERO = (
    *("tflops", "memory_gb", "hidden_size", "layers", "rows", "longest", "rows_per_rank", "fixed_rows"),
    *("max_tokens", "mini_batch_size", "pad_to_multiple", "length_multiple", "kb_per_slot"),
)
_MAY_BE_ZERO = ("overhead_ms", "fixed_gb")


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors take one line and suggest the most likely option."""

    def __init__(self, *, prog: str, ranks: str, description: str) -> None:
        """Set the command's name, its default for `--ranks`, and what its help says first."""
        epilog = "With a run's directory, its ranks and batching are the defaults."
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
        self.ranks = ranks

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the options with defaults filled in, and `given`, the names of options that were given."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            word = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(word, known, n=1)
            self.error(f"unknown option {word}; " + (f"did you mean {near[0]}?" if near else "see --help"))
        parsed.given = {name for name, value in vars(parsed).items() if value is not None and value is not False}
        defaults = {name: default for name, default, _, _ in _OPTIONS}
        defaults |= {"ranks": self.ranks, "mode": "packed", "algorithm": "best_fit_decreasing"}
        for name, default in defaults.items():
            if vars(parsed).get(name, default) is None:
                setattr(parsed, name, default)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(_WRONG_ARGUMENTS)


def parsers() -> tuple[OptionParser, OptionParser]:
    """Return the parsers of `plan` and `simulate`."""
    plan = OptionParser(prog="rlpack plan", ranks="8", description=_PLAN)
    simulate = OptionParser(prog="rlpack simulate", ranks="8,64,512", description=_SIMULATE)
    for parser in (plan, simulate):
        parser.add_argument(
            "lengths",
            help=f".jsonl, .npy or .parquet of lengths, a run's directory, or a synthetic trace: {', '.join(TRACES)}",
        )
        parser.add_argument("--column", help="column of the length in a .jsonl or .parquet file (default: length)")
        parser.add_argument(
            "--ranks", help=f"data-parallel ranks, one number or several, separated by commas (default: {parser.ranks})"
        )
        parser.add_argument("--mini-batch-size", type=int, help="rows of an optimizer step (default: all)")
        for name, default, kind, meaning in _OPTIONS:
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{meaning} (default: {default})")
        parser.add_argument(
            "--kb-per-slot",
            type=float,
            help="activations that a token slot keeps, in kB (default: 34 bytes × hidden size × layers)",
        )
    plan.add_argument("--mode", choices=MODES, help="batching mode (default: packed)")
    plan.add_argument("--algorithm", choices=ALGORITHMS, help="packer of packed mode (default: best_fit_decreasing)")
    plan.add_argument("--compare", action="store_true", help="show all algorithms and modes")
    plan.add_argument(
        "--suggest", action="store_true", help="search mode (or only --mode), budget, alignment and algorithm"
    )
    plan.add_argument("--fit", action="store_true", help="fit times to the steps of the given run")
    plan.add_argument(
        "--picture", type=Path, metavar="FILE", help=f"draw the first optimizer step, as {', '.join(PICTURES)}"
    )
    simulate.add_argument(
        "--async", action="store_true", help="forecast running ahead; see rlpack simulate --async --help"
    )
    simulate.add_argument(
        "--rows-per-rank", type=int, help="rows per rank instead of in total; a file's rows are repeated"
    )
    return plan, simulate


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse numbers out of range, and options without effect.

    Raises:
        PackingError: names the option.
    """
    for count in rank_counts(arguments.ranks):
        if not 1 <= count <= MAX_RANKS:
            raise PackingError(f"--ranks is {count}; it has to be from 1 to {MAX_RANKS}")
    for name in (*_ABOVE_ZERO, *_MAY_BE_ZERO):
        if (value := vars(arguments).get(name)) is not None:
            most = MAX_ROWS if name == "rows" else MAX_LENGTH
            check_number(_option(name), value, most, may_be_zero=name in _MAY_BE_ZERO)
    if arguments.fixed_gb >= arguments.memory_gb:
        raise PackingError(
            f"--fixed-gb ({arguments.fixed_gb:g}) leaves no memory of --memory-gb ({arguments.memory_gb:g}); "
            "lower --fixed-gb or raise --memory-gb"
        )
    _check_rows(arguments)
    for options, needs_not, why in (*_of_source(arguments), *_of_command(arguments)):
        for name in options:
            if needs_not and name in arguments.given:
                raise PackingError(f"{_option(name)} {why}; remove it")


def check_number(option: str, value: float, most: int = MAX_LENGTH, *, may_be_zero: bool) -> None:
    """Refuse a number out of range.

    Args:
        option: the option's name, for messages.
        value: its value, as given.
        most: limit of a whole number; others have none.
        may_be_zero: whether 0 is allowed.

    Raises:
        PackingError: the value is negative, not finite, over the limit, or 0 where it may not be.
    """
    if isinstance(value, int) and value > most:
        raise PackingError(f"{option} is {value:,}, over the limit of {most:,}; lower it")
    text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    if not -math.inf < value < math.inf:
        raise PackingError(f"{option} is {text}; it has to be finite")
    if value < 0 or (value == 0 and not may_be_zero):
        raise PackingError(f"{option} is {text}; it has to be {'at least' if may_be_zero else 'above'} 0")


def _check_rows(arguments: argparse.Namespace) -> None:
    per_rank = vars(arguments).get("rows_per_rank")
    if per_rank is not None and (most := max(rank_counts(arguments.ranks))) * per_rank > MAX_ROWS:
        raise PackingError(
            f"--rows-per-rank {per_rank:,} makes {most * per_rank:,} rows on {most:,} ranks, over the limit of "
            f"{MAX_ROWS:,}; lower it"
        )


def _of_source(arguments: argparse.Namespace) -> Iterator[tuple[Sequence[str], bool, str]]:
    """Yield options, whether they have no effect on these lengths, and why."""
    source = arguments.lengths
    is_trace = source in TRACES
    yield ("rows", "longest", "seed"), not is_trace, f"is for synthetic traces, but {source} is not one"
    yield ("column",), is_trace, f"is for files, but {source} is a synthetic trace"
    has_columns = Path(source).suffix in (".jsonl", ".parquet")
    yield ("column",), not has_columns, f"is for .jsonl and .parquet files, but {source} is not one"
    yield ("rows",), "rows_per_rank" in arguments.given, "is the total of all ranks, but --rows-per-rank is given"


def _of_command(arguments: argparse.Namespace) -> Iterator[tuple[Sequence[str], bool, str]]:
    """Yield options, whether they have no effect given the others, and why."""
    given = arguments.given
    if "fit" in given:
        yield ("tflops", "overhead_ms"), True, "is fitted by --fit"
        why = "sets times and memory, which --fit and --kb-per-slot set already"
        yield ("hidden_size", "layers"), "kb_per_slot" in given, why
    yield ("picture",), len(rank_counts(arguments.ranks)) > 1, "draws one plan, but --ranks has several numbers"
    if "mode" not in vars(arguments) or "compare" in given:
        yield ("mode", "algorithm"), True, "chooses one, but --compare shows all"
        return
    mode, searches = arguments.mode, "suggest" in given
    no_packing, no_padding = mode != "packed" and not searches, mode == "packed" and not searches
    yield ("algorithm",), mode != "packed", f"is for packed mode, but --mode is {mode}"
    yield ("pad_to_multiple",), no_packing, f"is for packed mode, but --mode is {mode}"
    yield ("length_multiple",), no_padding and "picture" not in given, "is for padded modes, but --mode is packed"
    yield ("fixed_rows",), mode != "fixed" and "picture" not in given, f"is for fixed mode, but --mode is {mode}"
    yield ("max_tokens",), mode == "fixed", "has no effect on fixed mode, whose microbatches have --fixed-rows rows"


def rank_counts(text: str) -> list[int]:
    """Parse a comma-separated list of rank counts.

    Raises:
        PackingError: an entry is not a whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise PackingError(f"--ranks is {text!r}; give whole numbers separated by commas, such as 8,64,512") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
