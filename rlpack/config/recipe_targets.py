"""Which recipes a command line chooses, found before it is composed.

Hydra refuses an override of a key that its base node lacks, so the sections of a recipe have to be in the base node
before Hydra reads `my_section.key=3`. In order of precedence, `recipe.target=…`, the `recipe.target` of the root config
(`--config-name`) or of an experiment, or the recipe's preset decides. The command line chooses the preset, or else the
defaults lists of the root config and of experiments. Each of these may include other presets. A sweep can choose
several recipes.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

_DEFAULT_RECIPE, _DEFAULT_ROOT = "grpo", "train"
_SELF = "_self_"


def recipe_targets(overrides: Sequence[str], folders: Sequence[Path], root: str = _DEFAULT_ROOT) -> list[str]:
    """Return each `recipe.target` that a job of a command line may have; never empty where presets are whole.

    Args:
        overrides: Hydra overrides as written; what can't be parsed is left for Hydra to refuse.
        folders: config directories, which hold `<group>/<choice>.yaml`.
        root: name of the root config.
    """
    if explicit := chosen_values(overrides, "recipe.target"):
        return explicit
    if (target := _target(folders, root)) is not None:
        return [target]
    roots = list(_values(folders, root, own_first=True))
    named = chosen_values(overrides, "experiment") or _choice(roots, "experiment")
    experiments = [f"experiment/{choice}" for choice in named]
    if targets := [target for name in experiments if (target := _target(folders, name))]:
        return targets
    chosen = (
        chosen_values(overrides, "recipe")
        or _choice(roots, "recipe", plain=False)
        or [choice for name in experiments for choice in _choice(_values(folders, name, own_first=True), "/recipe")]
        or _choice(roots, "recipe")
        or [_DEFAULT_RECIPE]
    )
    return [target for choice in chosen if (target := _target(folders, f"recipe/{choice}"))]


def _choice(configs: Iterable[dict[str, Any]], group: str, *, plain: bool = True) -> list[str]:
    """Return what defaults lists choose for a group: the first `override`, else the first plain entry if `plain`."""
    names = {group, f"/{group.removeprefix('/')}"}
    entries = [
        (str(name).split(), choice)
        for values in configs
        for entry in _defaults(values)
        if isinstance(entry, dict)
        for name, choice in entry.items()
    ]
    overriding = [choice for words, choice in entries if words[:-1] == ["override"] and words[-1] in names]
    listed = [choice for words, choice in entries if len(words) == 1 and words[0] in names] if plain else []
    for choice in (*overriding, *listed):
        return [str(one) for one in (choice if isinstance(choice, list) else [choice]) if one is not None]
    return []


def _values(
    folders: Sequence[Path], name: str, *, own_first: bool = False, seen: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the values of a config and of those that its defaults list includes by name, highest precedence first.

    Args:
        folders: config directories.
        name: of the config, such as `train` or `experiment/mine`.
        own_first: whether a config precedes all that it includes, as its choices of groups do, wherever `_self_` is.
        seen: configs that include this one.
    """
    name = name.removesuffix(".yaml")
    if name in seen:
        return
    values, group = _read(folders, name), name.rpartition("/")[0]
    entries = [entry for entry in _defaults(values) if isinstance(entry, str)]
    if own_first or _SELF not in entries:  # without `_self_`, Hydra appends it
        entries = [*(entry for entry in entries if entry != _SELF), _SELF]
    for entry in reversed(entries):
        if entry == _SELF:
            yield values
        else:
            other = entry.removeprefix("/") if entry.startswith("/") or not group else f"{group}/{entry}"
            yield from _values(folders, other, own_first=own_first, seen=(*seen, name))


def _defaults(values: dict[str, Any]) -> list[Any]:
    defaults = values.get("defaults")
    return defaults if isinstance(defaults, list) else []


def chosen_values(overrides: Sequence[str], key: str) -> list[str]:
    """Return every value that the last override of a key or group gives it, those of sweeps and lists included."""
    given = [text for text in overrides if text.lstrip("+").partition("=")[0] == key]
    return [str(value) for text in given[-1:] for value in _override_values(text)]


def _override_values(text: str) -> Iterator[Any]:
    try:
        override = OverridesParser.create().parse_override(text)
        values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    except (HydraException, ValueError, RecursionError):
        return
    for value in values:
        yield from value if isinstance(value, list) else [value]


def _read(folders: Sequence[Path], name: str) -> dict[str, Any]:
    """Return the values of a config, or nothing if it can't be read, which Hydra reports."""
    for folder in folders:
        path = folder / f"{name}.yaml"
        if path.is_file():
            try:
                values = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError, yaml.YAMLError):
                continue
            return values if isinstance(values, dict) else {}
    return {}


def _target(folders: Sequence[Path], name: str) -> str | None:
    """Return the `recipe.target` of a config or of those that it includes, None if none has one."""
    for values in _values(folders, name):
        recipe = values.get("recipe")
        if isinstance(recipe, dict) and isinstance(target := recipe.get("target"), str):
            return target
    return None
