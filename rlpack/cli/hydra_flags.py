"""Hydra's own options on the command line of `rlpack train`, and the folders of presets that they name."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from rlpack.config.compose import PRESETS

_FIRST_DIRECTORY_FLAGS = {"--config-path", "-cp"}
_LAST_DIRECTORY_FLAGS = {"--config-dir", "-cd"}
DIRECTORY_FLAGS = _FIRST_DIRECTORY_FLAGS | _LAST_DIRECTORY_FLAGS
NAME_FLAGS = {"--config-name", "-cn"}
SWEEP_FLAGS = {"--multirun", "-m"}
# Options of `rlpack train` that are no flags of Hydra.
ESTIMATE_FLAGS = ("--dry-run", "--memory-gb")
FLAGS = (
    DIRECTORY_FLAGS
    | NAME_FLAGS
    | SWEEP_FLAGS
    | {
        *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r"),
        *("--shell-completion", "-sc", "--experimental-rerun", "--info", "-i"),
    }
)


def search_path(flags: Sequence[str]) -> list[Path]:
    """Return Hydra's search path: `--config-path` comes before the presets, `--config-dir` after them."""
    first, last = (map(Path, values_of(flags, names)) for names in (_FIRST_DIRECTORY_FLAGS, _LAST_DIRECTORY_FLAGS))
    return [*first, PRESETS, *last]


def values_of(flags: Sequence[str], names: set[str]) -> Iterator[str]:
    """Yield the values of flags with one of the names, as `--flag value` or `--flag=value`."""
    for flag, following in zip_longest(flags, flags[1:], fillvalue=""):
        name, has_value, value = flag.partition("=")
        if name in names:
            yield value if has_value else following
