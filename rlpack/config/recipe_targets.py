"""Which recipes a command line chooses, found before it is composed.

Hydra refuses an override of a key that its base node lacks, so the sections of a recipe have to be in the base node
before Hydra reads `my_section.key=3`. In order of precedence, `recipe.target=…`, an
experiment, or the recipe's preset decides. A sweep can choose several recipes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

_DEFAULT_RECIPE = "grpo"


def recipe_targets(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return each `recipe.target` that a job of a command line may have; never empty where presets are whole.

    Args:
        overrides: Hydra overrides as written; what can't be parsed is left for Hydra to refuse.
        folders: config directories, which hold `<group>/<choice>.yaml`.
    """
    if explicit := _values(overrides, "recipe.target"):
        return explicit
    experiments = [_read(folders, "experiment", choice) for choice in _values(overrides, "experiment")]
    if targets := [target for values in experiments if (target := _target(values))]:
        return targets
    chosen = [recipe for values in experiments for recipe in _recipes(values)]
    chosen = _values(overrides, "recipe") or chosen or [_DEFAULT_RECIPE]
    return [target for choice in chosen if (target := _target(_read(folders, "recipe", choice)))]


def _values(overrides: Sequence[str], key: str) -> list[str]:
    """Return every value that overrides give to a key or group, those of sweeps and lists included."""
    return [str(value) for text in overrides for value in _override_values(text, key)]


def _override_values(text: str, key: str) -> Iterator[Any]:
    if text.lstrip("+").partition("=")[0] != key:
        return
    try:
        override = OverridesParser.create().parse_override(text)
        values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    except (HydraException, ValueError, RecursionError):
        return
    for value in values:
        yield from value if isinstance(value, list) else [value]


def _read(folders: Sequence[Path], group: str, choice: str) -> dict[str, Any]:
    """Return the values of a preset, or nothing if it can't be read, which Hydra reports."""
    for folder in folders:
        path = folder / group / f"{choice}.yaml"
        if path.is_file():
            try:
                values = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeError):
                continue
            return values if isinstance(values, dict) else {}
    return {}


def _target(values: dict[str, Any]) -> str | None:
    recipe = values.get("recipe")
    target = recipe.get("target") if isinstance(recipe, dict) else None
    return target if isinstance(target, str) else None


def _recipes(values: dict[str, Any]) -> Iterator[str]:
    """Yield the recipe presets that an experiment's defaults list chooses."""
    defaults = values.get("defaults")
    for entry in defaults if isinstance(defaults, list) else []:
        for name, choice in entry.items() if isinstance(entry, dict) else []:
            if str(name).split() in (["override", "/recipe"], ["/recipe"]):
                yield str(choice)
