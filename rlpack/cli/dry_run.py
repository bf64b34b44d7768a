"""`rlpack train --dry-run`: its options, and the jobs that it estimates instead of running them."""

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlpack.cli.error_text import print_error
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Config
from rlpack.user_code import UserCode, exit_now

_FLAG, _MEMORY = "--dry-run", "--memory-gb"
DOES_NOT_FIT = 1
_INTERRUPTED = 130


def split_options(arguments: Sequence[str]) -> tuple[bool, float | None, list[str]]:
    """Return whether `--dry-run` is given, the value of `--memory-gb`, and the other arguments.

    Raises:
        ConfigError: the memory is not a number above 0, or is given without `--dry-run`, which takes no value.
    """
    words = iter(arguments)
    is_dry, memory, rest = False, None, []
    for word in words:
        name, has_value, value = word.partition("=")
        if name == _FLAG:
            if has_value:
                raise ConfigError([f"{word}: {_FLAG} takes no value; write just {_FLAG}"])
            is_dry = True
        elif name == _MEMORY:
            memory = positive_number(_MEMORY, value if has_value else next(words, ""))
        else:
            rest.append(word)
    if memory is not None and not is_dry:
        raise ConfigError([f"{_MEMORY} is for {_FLAG}, which is not given; add it, or remove {_MEMORY}"])
    return is_dry, memory, rest


def positive_number(option: str, text: str) -> float:
    """Parse the number of an option.

    Raises:
        ConfigError: it is not a number above 0.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e9:
        raise ConfigError([f"{option} is {text!r}; give a number above 0, such as {option} 80"])
    return number


@contextmanager
def leaving_on_interrupt(command: str) -> Iterator[None]:
    """End the process on Ctrl-C: Python can't end cleanly while another thread simulates a rank."""
    try:
        yield
    except KeyboardInterrupt:
        print_error(command, "interrupted")
        sys.stdout.flush()
        sys.stderr.flush()
        exit_now(_INTERRUPTED)


def estimate(configs: Iterator[tuple[str, Config]], memory_gb: float | None) -> int:
    """Print the estimates of labeled configurations, and return the exit code: 0 if all fit."""
    module = importlib.import_module("rlpack.recipes.dry_run.estimate_run")
    code = 0
    for label, config in configs:
        if label:
            print(f"\n{label}")
        with leaving_on_interrupt("train"), UserCode(f"recipe.target {config.recipe.target!r}"):
            code = code if module.main(config, memory_gb, print) else DOES_NOT_FIT
    return code
