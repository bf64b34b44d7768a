"""The options of `rlpack plan` and `rlpack simulate`: what they are, and which of them mean something together.

Options have no defaults in the parser, so that one which was given can be told from one that was not: an option that
would change nothing is refused, for whoever gave it expects something of it.
"""

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from rlpack.packing import Algorithm, Mode, PackingError
from rlpack.packing.analysis.traces import MAX_ROWS, TRACES
from rlpack.packing.request import MAX_RANKS

MODES: tuple[Mode, ...] = get_args(Mode)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
PICTURES = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "tiff")
_WRONG_ARGUMENTS = 2

# Name, default, type and meaning of the options of both commands.
_OPTIONS: tuple[tuple[str, Any, type, str], ...] = (
    ("rows", 16384, int, "rows of a synthetic trace"),
    ("longest", 8192, int, "its longest row"),
    ("seed", 0, int, "its seed"),
    ("max_tokens", 16384, int, "token budget of packed and dynamic microbatches"),
    ("pad_to_multiple", 1, int, "alignment of packed rows"),
    ("length_multiple", 1, int, "alignment of padded widths"),
    ("fixed_rows", 16, int, "rows of a fixed microbatch, whose slots no budget bounds"),
    ("hidden_size", 4096, int, "of the model"),
    ("layers", 32, int, "of the model"),
    ("tflops", 400.0, float, "a device sustains"),
    ("overhead_ms", 10.0, float, "every microbatch takes"),
    ("memory_gb", 80.0, float, "of a device"),
    ("fixed_gb", 0.0, float, "weights and optimizer on it"),
)
_ABOVE_ZERO = (
    *("tflops", "memory_gb", "hidden_size", "layers", "rows", "longest", "rows_per_rank", "fixed_rows"),
    *("max_tokens", "mini_batch_size", "pad_to_multiple", "length_multiple"),
)


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the option that was probably meant."""

    def __init__(self, *, prog: str, ranks: str) -> None:
        """Take the command's name, and the ranks that it takes when none are given."""
        super().__init__(prog=prog, epilog="Of a run's directory come, for what is not given, its ranks and batching.")
        self.ranks = ranks

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the options, each its default where it was not given, and `given`, the names of those that were."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            word = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(word, known, n=1)
            self.error(f"{word} is no option; " + (f"did you mean {near[0]}?" if near else "see --help"))
        found.given = {name for name, value in vars(found).items() if value is not None and value is not False}
        defaults = {name: default for name, default, _, _ in _OPTIONS}
        defaults |= {"ranks": self.ranks, "mode": "packed", "algorithm": "best_fit_decreasing"}
        for name, default in defaults.items():
            if vars(found).get(name, default) is None:
                setattr(found, name, default)
        return found

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong, and exit."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(_WRONG_ARGUMENTS)


def parsers() -> tuple[OptionParser, OptionParser]:
    """Return the parsers of `plan` and `simulate`."""
    plan, simulate = OptionParser(prog="rlpack plan", ranks="8"), OptionParser(prog="rlpack simulate", ranks="8,64,512")
    for parser in (plan, simulate):
        parser.add_argument(
            "lengths",
            help=f".jsonl, .npy or .parquet of lengths, a run's directory, or a synthetic trace: {', '.join(TRACES)}",
        )
        parser.add_argument("--column", help="where a row of a .jsonl or .parquet file holds its length (length)")
        parser.add_argument("--ranks", help=f"data-parallel ranks, one number or several with commas ({parser.ranks})")
        parser.add_argument("--mini-batch-size", type=int, help="rows of an optimizer step (all)")
        for name, default, kind, meaning in _OPTIONS:
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{meaning} ({default})")
        parser.add_argument(
            "--kb-per-slot", type=float, help="activations that a token slot keeps (34 bytes × hidden size × layers)"
        )
    plan.add_argument("--mode", choices=MODES, help="(packed)")
    plan.add_argument("--algorithm", choices=ALGORITHMS, help="packer of packed mode (best_fit_decreasing)")
    plan.add_argument("--compare", action="store_true", help="show all algorithms and modes")
    plan.add_argument(
        "--suggest", action="store_true", help="search mode (or --mode alone), budget, alignment and algorithm"
    )
    plan.add_argument("--fit", action="store_true", help="take times from the steps of the run that is named")
    plan.add_argument(
        "--picture", type=Path, metavar="FILE", help=f"draw the first optimizer step, as {', '.join(PICTURES)}"
    )
    simulate.add_argument(
        "--rows-per-rank", type=int, help="rows for each rank instead of as many for all; a file's are repeated"
    )
    return plan, simulate


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse numbers that nothing can be computed with, and options that would change nothing.

    Raises:
        PackingError: by the name that the user knows.
    """
    for count in rank_counts(arguments.ranks):
        if not 1 <= count <= MAX_RANKS:
            raise PackingError(f"--ranks is {count}; it has to be from 1 to {MAX_RANKS}")
    for name in _ABOVE_ZERO:
        value = vars(arguments).get(name)
        if value is not None and value <= 0:
            raise PackingError(f"{_option(name)} is {value:g}; it has to be above 0")
    if arguments.fixed_gb >= arguments.memory_gb:
        raise PackingError(
            f"--fixed-gb is {arguments.fixed_gb:g}, and --memory-gb {arguments.memory_gb:g} leaves nothing for "
            "activations; lower the one or raise the other"
        )
    _check_rows(arguments)
    for options, needs_not, why in (*_of_source(arguments), *_of_command(arguments)):
        for name in options:
            if needs_not and name in arguments.given:
                raise PackingError(f"{_option(name)} {why}; leave it out")


def _check_rows(arguments: argparse.Namespace) -> None:
    per_rank = vars(arguments).get("rows_per_rank")
    if arguments.rows > MAX_ROWS:
        raise PackingError(f"--rows is {arguments.rows:,}, over the limit of {MAX_ROWS:,}; lower it")
    if per_rank is not None and (most := max(rank_counts(arguments.ranks))) * per_rank > MAX_ROWS:
        raise PackingError(
            f"--rows-per-rank {per_rank:,} makes {most * per_rank:,} rows on {most:,} ranks, over the limit of "
            f"{MAX_ROWS:,}; lower it"
        )


def _of_source(arguments: argparse.Namespace) -> Iterator[tuple[Sequence[str], bool, str]]:
    """Yield names of options, whether they change nothing for these lengths, and why."""
    source = arguments.lengths
    is_trace = source in TRACES
    yield ("rows", "longest", "seed"), not is_trace, f"is for synthetic traces, and {source} is none"
    yield ("column",), is_trace, f"is for files, and {source} is a synthetic trace"
    has_columns = Path(source).suffix in (".jsonl", ".parquet")
    yield ("column",), not has_columns, f"is for .jsonl and .parquet files, and {source} is none"
    yield ("rows",), "rows_per_rank" in arguments.given, "is the count for all ranks, and --rows-per-rank was given"


def _of_command(arguments: argparse.Namespace) -> Iterator[tuple[Sequence[str], bool, str]]:
    """Yield names of options, whether they change nothing beside the others, and why."""
    given = arguments.given
    if "fit" in given:
        yield ("tflops", "overhead_ms"), True, "is what --fit takes from the run"
        why = "tells times and memory, which --fit and --kb-per-slot have told"
        yield ("hidden_size", "layers"), "kb_per_slot" in given, why
    if "mode" not in vars(arguments) or "compare" in given:
        yield ("mode", "algorithm"), True, "chooses one, and --compare shows all"
        return
    mode, searches = arguments.mode, "suggest" in given
    no_packing, no_padding = mode != "packed" and not searches, mode == "packed" and not searches
    yield ("algorithm",), mode != "packed", f"is of packed mode, and --mode is {mode}"
    yield ("pad_to_multiple",), no_packing, f"is of packed mode, and --mode is {mode}"
    yield ("length_multiple",), no_padding and "picture" not in given, "is of padded modes, and --mode is packed"
    yield ("fixed_rows",), mode != "fixed" and "picture" not in given, f"is of fixed mode, and --mode is {mode}"
    yield ("max_tokens",), mode == "fixed", "bounds no microbatch of fixed mode, which takes --fixed-rows rows each"
    yield ("picture",), len(rank_counts(arguments.ranks)) > 1, "draws one plan, and --ranks has several numbers"


def rank_counts(text: str) -> list[int]:
    """Return the numbers of ranks that a list with commas names.

    Raises:
        PackingError: one is no whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise PackingError(f"--ranks is {text!r}; give whole numbers with commas, such as 8,64,512") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
