"""Fill the figures of README.md from benchmarks/RESULTS.md.

    python -m benchmarks.readme_figures [--write]

A figure in README.md stands between two comments, `<!-- figure: plan_ms -->10 ms<!-- end -->`; its name is one of
`FIGURES`, which find it in RESULTS.md. Without `--write`, prints those that differ, and exits with 1 if any do.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md"
# In the order of README's row.
RECIPES = ("ppo", "dapo", "gspo", "rloo", "reinforce_plus_plus", "remax")
# As their papers write them.
_NAMES = {"grpo": "GRPO", "reinforce_plus_plus": "REINFORCE++", "remax": "ReMax"}
_PLACE = re.compile(r"(<!-- figure: (\w+) -->)(.*?)(<!-- end -->)")
_DURATION = re.compile(r"(?:(\d+) min )?(\d+) s\b")


def main() -> int:
    """Compare, or write, the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the figures into README.md")
    arguments = parser.parse_args()
    readme, results = README.read_text(encoding="utf-8"), RESULTS.read_text(encoding="utf-8")
    if arguments.write:
        README.write_text(filled(readme, results), encoding="utf-8")
        return 0
    stale = differences(readme, results)
    print("\n".join(stale) or "README.md has the figures of RESULTS.md")
    return int(bool(stale))


def filled(readme: str, results: str) -> str:
    """Return the text of README.md with the figures of `results`.

    Raises:
        KeyError: README.md names a figure that is not in `FIGURES`.
        LookupError: RESULTS.md lacks the place that a figure is read from.
    """
    return _PLACE.sub(lambda place: f"{place[1]}{FIGURES[place[2]](results)}{place[4]}", readme)


def differences(readme: str, results: str) -> list[str]:
    """Return a line for each figure of README.md that isn't the one of RESULTS.md."""
    places = [(place[2], place[3], FIGURES[place[2]](results)) for place in _PLACE.finditer(readme)]
    return [f"{name}: README.md has {shown!r}, RESULTS.md {right!r}" for name, shown, right in places if shown != right]


def number(results: str, label: str) -> float:
    """Return the first number after `label`."""
    match = re.search(re.escape(label) + r"\D*?([\d,]+(?:\.\d+)?)", results)
    if match is None:
        raise LookupError(f"{RESULTS.name} has no number after {label!r}")
    return float(match[1].replace(",", ""))


def column(results: str, section: str, name: str) -> dict[str, str]:
    """Return a column of the first table under a heading, by the table's first column.

    A column's name may begin the same as others'; the first one that begins with `name` is meant.
    """
    table = re.search(rf"^## {re.escape(section)}\n(?:(?!^##).*\n)*?((?:\|.*\n)+)", results, re.MULTILINE)
    if table is None:
        raise LookupError(f"{RESULTS.name} has no table under {section!r}")
    header, _, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table[1].splitlines())
    index = next((index for index, cell in enumerate(header) if cell.startswith(name)), None)
    if index is None:
        raise LookupError(f"the table under {section!r} has no column {name!r}; it has {header}")
    return {cells[0].strip("`"): cells[index] for cells in rows}


def seconds(durations: Mapping[str, str]) -> list[int]:
    """Return the durations in a column's cells, in seconds.

    >>> seconds({"a": "3 min 48 s", "b": "", "c": "190 s (seed 2), 228 s (seed 1)"})
    [228, 190, 228]
    """
    found = [match for text in durations.values() for match in _DURATION.finditer(text)]
    return [60 * int(match[1] or 0) + int(match[2]) for match in found]


def span(values: list[int]) -> str:
    """Return the least and the largest duration.

    >>> span([60, 228, 190]), span([126])
    ('1 min 0 s to 3 min 48 s', '2 min 6 s')
    """
    shown = [f"{value // 60} min {value % 60} s" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(shown))


def percent(cell: str) -> str:
    """Return the first percentage of a cell, without decimals."""
    return f"{number(cell, ''):.0f}"


def _train(column_name: str) -> Callable[[str], str]:
    return lambda results: span(seconds(column(results, "The default run", column_name)))


def _learned(results: str) -> str:
    section = "Held-out accuracy of the default run"
    before, after = (column(results, section, name) for name in ("before", "after the last"))
    return ", ".join(f"{percent(before[seed])} → {percent(after[seed])} %" for seed in before)


def _learned_greedy(results: str) -> str:
    cells = column(results, "Held-out accuracy of the default run", "greedy before and after")
    pairs = [[percent(side) for side in cell.split(",")] for cell in cells.values()]
    return ", ".join(f"{before} → {after} %" for before, after in pairs)


def _recipes(results: str) -> str:
    cells = column(results, "Other recipes on the default task", "seed 1")
    return ", ".join(f"{number(cells[recipe], ','):.0f}" for recipe in RECIPES) + " %"


def _times(results: str) -> dict[str, list[int]]:
    """Return the seconds of the runs of each recipe that were timed."""
    section, times = "Other recipes on the default task", dict[str, list[int]]()
    for seed in (1, 2, 3):
        for recipe, cell in column(results, section, f"seconds, seed {seed}").items():
            times.setdefault(recipe, []).extend([int(cell)] if cell else [])
    return {recipe: measured for recipe, measured in times.items() if measured}


def _recipe_times(results: str) -> str:
    return span([measured for of_recipe in _times(results).values() for measured in of_recipe])


def _timed_recipes(results: str) -> str:
    """Return which recipes were timed, and how many runs of each."""
    times = _times(results)
    return ", ".join(f"{_NAMES.get(recipe, recipe.upper())} ({len(times[recipe])})" for recipe in times)


FIGURES: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "train_clone": _train("from a clean clone"),
        "train_alone": _train("the run alone"),
        "first_step": lambda results: f"{_second_cell(results, '`rlpack train` to its first optimizer step'):.0f} s",
        "learned": _learned,
        "learned_greedy": _learned_greedy,
        "greedy_seed_1": lambda results: _learned_greedy(results).partition(",")[0].replace(" →", " to"),
        "recipes": _recipes,
        "recipe_times": _recipe_times,
        "timed_recipes": _timed_recipes,
        "packed_fixed": lambda results: f"{number(results, 'packed/fixed:'):.2f} ×",
        "packed_dynamic": lambda results: f"{number(results, 'packed/dynamic:'):.2f} ×",
        "plan_ms": lambda results: f"{number(results, 'plan of 16,384 rows, 64 ranks, 8 optimizer steps, ms'):.0f} ms",
        "large_plan_s": lambda results: (
            f"{number(results, 'plan of 262,144 rows, 1,024 ranks, 64 optimizer steps, s'):.2f} s"
        ),
        "waiting": lambda results: (
            f"{100 * (1 - number(results, 'lock-step efficiency, 5 and more microbatches a rank, median')):.3f} %"
        ),
        "memory": lambda results: f"{number(results, 'naive/rlpack:'):.0f} ×",
        "trl": lambda results: f"{_ratio(results, 'TRL pack_dataset, bfd'):.0f} ×",
        "trl_sft": lambda results: f"{_sft_ratio(results):.2f} ×",
        "verl": lambda results: f"{_ratio(results, 'verl get_seqlen_balanced_partitions'):.0f} ×",
    }
)


def _second_cell(results: str, row: str) -> float:
    """Return the number in the third column, "now", of a row that begins with `row`."""
    match = re.search(rf"^\| {re.escape(row)}[^|]*\|[^|]*\| ([\d.]+) s", results, re.MULTILINE)
    if match is None:
        raise LookupError(f"{RESULTS.name} has no row {row!r}")
    return float(match[1])


def _sft_ratio(results: str) -> float:
    """Return how many times as many tokens as TRL's SFTTrainer rlpack trains on per second."""
    match = re.search(r"TRL's faster way [\d,]+: ([\d.]+) \(at least 1\.2\)", results)
    if match is None:
        raise LookupError(f"{RESULTS.name} has no output of benchmarks.trl_sft")
    return float(match[1])


def _ratio(results: str, peer: str) -> float:
    """Return how many times as long as ours a peer takes."""
    match = re.search(rf"^{re.escape(peer)} .* ([\d.]+) ×$", results, re.MULTILINE)
    if match is None:
        raise LookupError(f"{RESULTS.name} has no ratio of {peer!r}; run `make peers`")
    return float(match[1])


if __name__ == "__main__":
    sys.exit(main())
