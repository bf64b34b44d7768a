"""Write docs/migration.md from the names of other frameworks: `python -m rlpack.config.migration_page`."""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from rlpack.config.foreign_names import ForeignName, foreign_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"

_HEAD = """\
# Coming from another framework

Generated from `rlpack/config/foreign_names.yaml` by `python -m rlpack.config.migration_page`; don't edit it by hand.

The tables list the keys of other frameworks and their equivalents in rlpack. `rlpack train` knows them, too: if you use
one of these names, the error message gives rlpack's. [reference/config.md](reference/config.md) explains every key.
"""


def render() -> str:
    """Return the page's text: one table for each framework."""
    return "\n".join([_HEAD, *_tables()])


def main() -> int:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    return 0


def _tables() -> Iterator[str]:
    for framework, names in groupby(foreign_names(), key=lambda name: name.framework):
        yield f"## {framework}\n\n| {framework} | rlpack | note |\n|---|---|---|"
        yield from map(_row, names)
        yield ""


def _row(name: ForeignName) -> str:
    keys = ", ".join(f"`{key}`" for key in name.keys) or "–"
    return f"| `{name.name}` | {keys} | {name.note} |"


if __name__ == "__main__":
    sys.exit(main())
