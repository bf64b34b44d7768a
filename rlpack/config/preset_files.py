"""Check a user's own presets, `<group>/<choice>.yaml` in a `--config-dir`, before Hydra composes them.

Hydra puts the keys of `experiment/mine.yaml` below `experiment`, unless its header says `# @package _global_`. Without
the header every key looks unknown, so the missing line has its own message.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from rlpack.config.keys import Key, children
from rlpack.config.preset_defaults import Presets, defaults_problems
from rlpack.config.recipe_targets import chosen_values

GLOBAL = "# @package _global_"
_PACKAGE = re.compile(r"#\s*@package\s+\S")


def preset_problems(overrides: Sequence[str], presets: Presets, root: Key) -> list[str]:
    """Return the problems of chosen presets: unreadable, a wrong `defaults` list, or no header although keys need it.

    Args:
        overrides: Hydra overrides as written.
        presets: those that exist, and the config directories of the user.
        root: key that all keys are below.
    """
    folders = presets.folders
    groups = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()}
    files = (
        (group, folder / group / f"{choice.removesuffix('.yaml')}.yaml")
        for group in sorted(groups)
        for choice in chosen_values(overrides, group)
        for folder in folders
    )
    return [
        problem for group, path in files if os.path.lexists(path) for problem in _problems(group, path, root, presets)
    ]


def _problems(group: str, path: Path, root: Key, presets: Presets) -> Iterator[str]:
    """Yield why a preset can't be read, or that its keys would be put below its group instead of at the top level."""
    if not path.is_file():
        what = (
            "a folder" if path.is_dir() else "a link to a file that doesn't exist" if path.is_symlink() else "no file"
        )
        yield f"{path} is {what}; {group}={path.stem} needs a YAML file"
        return
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except UnicodeDecodeError as error:  # Hydra's error doesn't name the file
        yield f"{path} is not UTF-8: {error}; save the file as UTF-8"
        return
    except (OSError, ValueError, yaml.YAMLError):  # Hydra's error names line and column
        return
    if values is not None and not isinstance(values, dict):
        yield f"{path} holds a {type(values).__name__} instead of keys; write one key: value per line"
        return
    if values is not None and "defaults" in values:
        yield from defaults_problems(path, group, values["defaults"], presets)
    top = children(root)
    below = children(top[group]) if group in top else {}
    keys = set(values) - {"hydra"} if isinstance(values, dict) else set()
    if _has_package(text) or not keys or (below and not any(key in top and key not in below for key in keys)):
        return
    yield f"{path} lacks the line `{GLOBAL}`; add it as the first line, or its keys are set below {group}"


def _has_package(text: str) -> bool:
    """Return whether the comments at the beginning name a package; Hydra reads no others."""
    for line in filter(None, map(str.strip, text.splitlines())):
        if not line.startswith("#"):
            return False
        if _PACKAGE.match(line):
            return True
    return False
