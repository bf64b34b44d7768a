"""Warn of presets that a command chooses, but whose keys its `experiment` sets to other values.

Experiments are composed last, so `logger=console experiment=mine` logs as `mine` says.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlpack.config.preset_files import GLOBAL

_EXPERIMENT = "experiment"


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
    names = chosen.pop(_EXPERIMENT, "").strip("[]").split(",")
    setters = {key: name for name in names for key in _keys(_EXPERIMENT, name.strip(), folders)}
    for group, choice in chosen.items():
        for key, value in _keys(group, choice, folders).items():
            final = _value_of(values, key)
            is_given = any(f"{key}.".startswith(f"{name}.") for name in given if name != group)
            if key.startswith(f"{group}.") and key in setters and final != value and not is_given:
                yield (
                    f"{group}={choice} sets {key}={_text(value)}, but experiment={setters[key]}, which comes last, "
                    f"sets {_text(final)}; add {key}={_text(value)} to the command if you want that value"
                )


def _keys(group: str, choice: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the keys that a preset sets to plain values, with these values."""
    paths = (folder / group / f"{choice.removesuffix('.yaml')}.yaml" for folder in folders)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return {}
    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)  # with the types of the composed values
    is_global = GLOBAL in path.read_text(encoding="utf-8")
    return {
        key: value
        for key, value in _flat(loaded, "" if is_global else group)
        if not isinstance(value, list) and not (isinstance(value, str) and ("${" in value or value == "???"))
    }


def _flat(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        yield prefix, values
        return
    for name, value in values.items():
        if name != "defaults":
            yield from _flat(value, f"{prefix}.{name}".lstrip("."))


def _value_of(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
