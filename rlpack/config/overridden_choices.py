"""Warn of presets that a command chooses, but whose keys its `experiment` sets to other values.

Experiments are composed last, so `logger=console experiment=mine` logs as `mine` says.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlpack.config.preset_files import GLOBAL


def overridden_choices(
    overrides: Sequence[str], given: Collection[str], folders: Sequence[Path], values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a warning for each key of a chosen preset's own section that an experiment has overridden.

    Args:
        overrides: Hydra overrides as written.
        given: keys and groups that they set.
        folders: config directories, in Hydra's order: the first that has a preset counts.
        values: the composed configuration.
    """
    chosen = dict(override.split("=", 1) for override in overrides if "=" in override)
    experiment = chosen.pop("experiment", "null")
    if experiment in ("null", "[]"):
        return
    for group, choice in chosen.items():
        for key, value in _keys(group, choice, folders):
            final = _value_of(values, key)
            is_given = any(f"{key}.".startswith(f"{name}.") for name in given if name != group)
            if final != value and not is_given:
                yield (
                    f"{group}={choice} sets {key}={_text(value)}, but experiment={experiment}, which comes last, sets "
                    f"{_text(final)}; add {key}={_text(value)} to the command if you want that value"
                )


def _keys(group: str, choice: str, folders: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yield the keys below a group that a preset sets to plain values, with these values."""
    paths = (folder / group / f"{choice.removesuffix('.yaml')}.yaml" for folder in folders)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text) or {}
    for key, value in _flat(values.get(group, {}) if GLOBAL in text else values, group):
        if not isinstance(value, list) and not (isinstance(value, str) and ("${" in value or value == "???")):
            yield key, value


def _flat(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        yield prefix, values
        return
    for name, value in values.items():
        if name != "defaults":
            yield from _flat(value, f"{prefix}.{name}")


def _value_of(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
