"""`rlpack plan --suggest key=value …`: layouts, memory switches and budgets for a configuration that fit."""

import importlib
import os
from collections.abc import Sequence

from rlpack.cli.dry_run import DOES_NOT_FIT, leaving_on_interrupt, positive_number
from rlpack.cli.user_modules import import_from_working_directory
from rlpack.config.errors import ConfigError
from rlpack.user_code import UserCode

_SUGGEST = "--suggest"
_NUMBERS = ("--memory-gb", "--tflops", "--overhead-ms")
# Hydra's options for configs of the user, as in `rlpack train`.
_CONFIGS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")


def is_for_config(arguments: Sequence[str]) -> bool:
    """Return whether `rlpack plan` is given overrides, or nothing, instead of lengths."""
    if _SUGGEST not in arguments:
        return False
    previous = ""
    for word in arguments:
        is_value = word.startswith(("-", "~")) or previous in (*_NUMBERS, *_CONFIGS)
        # The path of a run may contain "=", too.
        if not is_value and ("=" not in word or os.path.exists(word)):
            return False
        previous = word
    return True


def suggest(arguments: Sequence[str]) -> int:
    """Print suggestions for the configuration of the overrides, and return the exit code: 0 if anything fits."""
    # Composing imports Hydra, which the other planning commands don't need.
    from rlpack.cli.environment import check_code
    from rlpack.cli.failed_run import report_failure
    from rlpack.cli.train import compose_jobs
    from rlpack.startup.first_checks import check_first

    try:
        import_from_working_directory()
        numbers, overrides = _split(arguments)
        jobs = compose_jobs(overrides)
        if len(jobs) != 1:
            raise ConfigError([f"rlpack plan {_SUGGEST} takes one configuration, not a sweep or one of Hydra's flags"])
        config = jobs[0].config
        check_code(config, os.environ)
        with leaving_on_interrupt("plan"), UserCode("code that the configuration names"):
            check_first(config, starts=False)
            search = importlib.import_module("rlpack.recipes.dry_run.suggest_layouts").main
            overhead_ms = numbers.get("--overhead-ms", 10.0)
            fits = search(config, numbers.get("--memory-gb"), numbers.get("--tflops"), overhead_ms, print)
    except Exception as error:  # noqa: BLE001 - every error becomes a message and an exit code
        return report_failure(error, "plan")
    return 0 if fits else DOES_NOT_FIT


def _split(arguments: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Return the options with numbers, and the overrides.

    Raises:
        ConfigError: an option has no effect here, or its value is not a number above 0.
    """
    numbers, overrides = {}, []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if name in _NUMBERS:
            numbers[name] = positive_number(name, value if has_value else next(words, ""))
        elif word.startswith("--") and word != _SUGGEST and name not in _CONFIGS:
            options = ", ".join((*_NUMBERS, *(one for one in _CONFIGS if one.startswith("--"))))
            raise ConfigError([f"{name} has no effect with {_SUGGEST} and overrides; use {options}"])
        elif word != _SUGGEST:
            overrides.append(word)
    return numbers, overrides
