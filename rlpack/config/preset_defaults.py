"""Check the `defaults` list of a user's preset before Hydra composes it.

Hydra's messages for a wrong entry name neither the file nor the existing choices; for some entries, such as a preset
that includes itself, there is no message at all.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

# Top-level files with a whole configuration: including one would reset every key.
_ROOTS = ("schema", "train", "evaluate")
_WORDS = ("override ", "optional ")
_SELF = "_self_"


@dataclass(frozen=True)
class Presets:
    """The presets that exist.

    Attributes:
        choices: names of the presets by group.
        chosen: groups with a choice in every run, which presets can only override.
        folders: the user's config directories.
    """

    choices: Mapping[str, Sequence[str]]
    chosen: Collection[str]
    folders: Sequence[Path]

    def file(self, group: str, name: str) -> Path | None:
        """Return the user's file of a preset, None if it is a shipped one."""
        paths = (folder / group / f"{name}.yaml" for folder in self.folders)
        return next((path for path in paths if path.is_file()), None)


def defaults_problems(path: Path, group: str, defaults: Any, presets: Presets) -> Iterator[str]:
    """Yield the problems of the `defaults` list of a preset, and of those that it includes.

    Args:
        path: of the preset.
        group: of the preset.
        defaults: value of its key `defaults`.
        presets: those that exist.
    """
    yield from _problems(path, group, defaults, presets, (path,))


def _problems(path: Path, group: str, defaults: Any, presets: Presets, seen: tuple[Path, ...]) -> Iterator[str]:
    if not isinstance(defaults, list):
        kind = "keys" if isinstance(defaults, dict) else f"a {type(defaults).__name__}"
        yield f"{path}: defaults holds {kind} instead of a list; write lines such as `- override /model: small`"
        return
    if defaults.count(_SELF) > 1:
        yield f"{path}: defaults lists {_SELF} {defaults.count(_SELF)} times; keep one"
    for entry in defaults:
        if isinstance(entry, str):
            yield from _included(path, group, entry, presets, seen)
        elif isinstance(entry, dict) and len(entry) == 1:
            [(name, choice)] = entry.items()
            yield from (f"{path}: defaults: {problem}" for problem in _chosen(group, str(name), choice, presets))
        else:
            what = f"{len(entry)} keys" if isinstance(entry, dict) else f"a {type(entry).__name__}"
            yield f"{path}: an entry of defaults holds {what}; write one group per line: `- override /model: small`"


def _included(path: Path, group: str, name: str, presets: Presets, seen: tuple[Path, ...]) -> Iterator[str]:
    """Yield the problems of an entry that includes another preset."""
    if name == _SELF or "@" in name:
        return
    if name in _WORDS or name.startswith(_WORDS):
        yield f"{path}: defaults: `{name}` names no choice; write `- override /<group>: <choice>`"
        return
    other, _, stem = name.lstrip("/").removesuffix(".yaml").rpartition("/")
    if name.startswith("/") and not other and stem in _ROOTS:
        yield f"{path}: defaults: `{name}` would reset every key; remove it"
        return
    other = other if name.startswith("/") else "/".join(filter(None, (group, other)))
    if other in presets.choices and stem not in presets.choices[other]:
        yield f"{path}: defaults: there is no preset {other}/{stem}{_hint(stem, presets.choices[other], other)}"
    elif (file := presets.file(other, stem)) is not None:
        if file in seen:
            yield f"{path}: defaults: `{name}` includes {file} again, which never ends; remove it"
            return
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):  # Hydra's error names it
            return
        if isinstance(values, dict) and "defaults" in values:
            yield from _problems(file, other, values["defaults"], presets, (*seen, file))


def _chosen(group: str, name: str, choice: Any, presets: Presets) -> Iterator[str]:
    """Yield the problems of an entry that chooses a preset of a group."""
    words, _, named = name.rpartition(" ")
    chosen = named.lstrip("/")
    if "@" in named or "/" in chosen or "optional" in words or "${" in str(choice):  # left to Hydra
        return
    line = f"- override /{chosen}: {choice}"
    if chosen not in presets.choices:
        nearest = get_close_matches(chosen, presets.choices, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ";"
        yield f"there is no group {chosen}{hint} the groups are {', '.join(presets.choices)}"
    elif chosen == group:
        yield f"`{name}: {choice}` would replace this preset; to add {chosen}={choice}, write `- {choice}`"
    elif isinstance(choice, list):
        yield f"{chosen} has more than one choice ({', '.join(map(str, choice))}); write `{line[: line.index(':')]}: …`"
    elif not isinstance(choice, str):
        yield f"the choice of {chosen} is {choice!r}; it has: {', '.join(presets.choices[chosen])}"
    elif choice.removesuffix(".yaml") not in presets.choices[chosen]:
        yield f"{chosen} has no choice {choice}{_hint(choice, presets.choices[chosen], chosen)}"
    elif chosen in presets.chosen and ("override" not in words or not named.startswith("/")):
        yield f"`- {name}: {choice}` adds a second {chosen}; write `{line}`"


def _hint(name: str, choices: Sequence[str], group: str) -> str:
    nearest = get_close_matches(name, choices, n=1)
    return f"{f'; did you mean {nearest[0]}?' if nearest else ';'} {group} has: {', '.join(choices)}"
