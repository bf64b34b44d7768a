"""The section of RESULTS.md that `benchmarks.gpu` writes: one part for each row, replaced when the row is run again."""

import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.figures import Setup
from benchmarks.gpu.rows import ROOT, ROWS, Outcome

HEADING = "## On one GPU"
_PACKAGES = ("torch", "transformers", "triton", "flash-attn", "ray", "vllm")


def table(outcome: Outcome) -> str:
    """Return the figures of a row as a Markdown table, and its failure.

    >>> from benchmarks.gpu.figures import Figure
    >>> print(table(Outcome((Figure("ratio", "2.1", "at least 2", True),), "ended at its deadline of 5 s")))
    | measured | value | bar | |
    |---|---|---|---|
    | ratio | 2.1 | at least 2 | kept |
    | **FAILED** | ended at its deadline of 5 s | | |
    """
    lines = ["| measured | value | bar | |", "|---|---|---|---|"]
    for figure in outcome.figures:
        lines.append(_line(figure.what, figure.value, figure.bar, figure.verdict))
    if outcome.failure:
        lines.append(_line("**FAILED**", outcome.failure, "", ""))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    """Return a line of a table; nothing in a cell ends it."""
    plain = (" ".join(cell.replace("|", "\\|").split()) for cell in cells)
    return "|" + "|".join(f" {cell} " if cell else " " for cell in plain) + "|"


def part(name: str, outcome: Outcome, where: str, setup: Setup) -> str:
    """Return a row's part of the section, between its marks."""
    command = f"python -m benchmarks.gpu --only {name}"
    if setup != Setup("cuda"):
        command += f" --device {setup.device}" + " --tiny" * setup.tiny
    title = ROWS[name].title
    return (
        f"<!-- gpu: {name} -->\n### {title[0].upper() + title[1:]}\n\n`{command}`, {where}\n\n{table(outcome)}\n"
        f"<!-- end of gpu: {name} -->\n"
    )


def written(page: str, parts: Mapping[str, str]) -> str:
    r"""Return a page whose section has these parts; parts of other rows stay as they are.

    >>> page = written("# Results\n", {"train": "<!-- gpu: train -->\nold\n<!-- end of gpu: train -->\n"})
    >>> print(written(page, {"train": "<!-- gpu: train -->\nnew\n<!-- end of gpu: train -->\n"}))
    # Results
    <BLANKLINE>
    ## On one GPU
    <BLANKLINE>
    <!-- gpu: train -->
    new
    <!-- end of gpu: train -->
    <BLANKLINE>
    """
    if f"\n{HEADING}\n" not in page:
        page = f"{page.rstrip()}\n\n{HEADING}\n"
    for name, text in parts.items():
        place = re.compile(rf"<!-- gpu: {name} -->\n.*?<!-- end of gpu: {name} -->\n", re.DOTALL)
        if place.search(page):
            page = place.sub(lambda _, text=text: text, page)
            continue
        start = page.index(f"\n{HEADING}\n") + len(HEADING) + 2
        following = page.find("\n## ", start)
        end = len(page) if following < 0 else following
        page = f"{page[:end].rstrip()}\n\n{text}{page[end:]}"
    return page


def surroundings(device: str) -> str:
    """Return date, commit, hardware and versions."""
    packages = ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name)) is not None)
    return f"{date.today()}, commit {commit()}, {hardware(device)}, Python {platform.python_version()}, {packages}"


def commit() -> str:
    """Return the commit with `-dirty` after it if files have changed; `unknown` without a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def hardware(device: str) -> str:
    """Return the name of the device, with memory, driver's and toolkit's versions of a GPU."""
    if device == "cpu":
        return platform.processor() or platform.machine()
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}"


def _version(package: str) -> str | None:
    """Return the version of an installed package, else None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def update(path: Path, parts: Mapping[str, str]) -> None:
    """Write parts into the section of a file, which may not exist yet."""
    page = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    path.write_text(written(page, parts), encoding="utf-8")
