"""The words of a command line: overrides, Hydra's flags, and what a shell split off an override at its spaces."""

from collections.abc import Sequence
from pathlib import Path

from rlpack.cli.hydra_flags import DIRECTORY_FLAGS, ESTIMATE_FLAGS, FLAGS, NAME_FLAGS
from rlpack.config.errors import ConfigError
from rlpack.config.keys import find, unknown_key_problem
from rlpack.config.yaml_limits import check_yaml_files

_OPENING, _CLOSING = "[{(", "]})"
_PLUGINS = ("hydra/launcher=", "hydra/sweeper=")


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into flags (with their values) and overrides, which Hydra's parser needs side by side.

    Raises:
        ConfigError: a word is neither, a flag is given twice, an unsupported plugin is chosen, or a config directory is
            unsafe.
    """
    flags: list[str] = []
    overrides: list[str] = []
    seen: list[str] = []
    previous = ""
    for index, word in enumerate(arguments):
        if word.startswith("-") or (previous.startswith("-") and "=" not in word):
            flags.append(word)
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            raise ConfigError([not_an_override(arguments, index, "trainer.steps=50")])
        flag, _, value = word.partition("=") if word.startswith("-") else (previous, "", word)
        if word.startswith("-") and flag not in FLAGS:
            raise ConfigError([_unknown_flag(flag)])
        if word.startswith("-") and flag in DIRECTORY_FLAGS | NAME_FLAGS:
            seen.append(flag)
        if flag in DIRECTORY_FLAGS and value:
            check_yaml_files(Path(value))
        previous = word
    if repeated := [flag for flag in seen if seen.count(flag) > 1]:
        raise ConfigError([f"{repeated[0]} is given {len(repeated)} times, but only the last would count; give one"])
    for override in overrides:
        if override.startswith(_PLUGINS) and not override.endswith("=basic"):
            raise ConfigError([f"{override} is not supported: the jobs of a sweep run one after another"])
    return flags, overrides


def _unknown_flag(flag: str) -> str:
    """Return the message for an unknown option, which was most likely meant as a key."""
    if flag in ESTIMATE_FLAGS:
        return f"{flag} is an option of rlpack train alone; estimate the run with `rlpack train --dry-run` first"
    key = flag.lstrip("-").replace("-", "_")
    hint = f"write {key}=…" if find(key) is not None else unknown_key_problem(key)
    return f"unknown option {flag}; overrides take no dashes: {hint}"


def not_an_override(arguments: Sequence[str], index: int, example: str) -> str:
    """Return the message for a word that is no override.

    Args:
        arguments: the words of the command.
        index: of the word.
        example: an override, for a word that isn't part of one.

    >>> not_an_override(["trainer.steps", "=", "5"], 0, "seed=1")
    "'trainer.steps' is not an override; write trainer.steps=5, without spaces"
    >>> not_an_override(["a.b=[3,", "4]"], 1, "seed=1")
    "'4]' is not an override; a value with spaces needs quotes, in a shell as 'a.b=[3, 4]'"
    """
    return f"{arguments[index]!r} is not an override; {_way_out(arguments, index, example)}"


def _way_out(arguments: Sequence[str], index: int, example: str) -> str:
    word, before, after = arguments[index], arguments[index - 1] if index else "", list(arguments[index + 1 :])
    value = "".join(after[:2]) if after[:1] == ["="] else after[0] if after else ""
    if value[:1] == "=" and value != "=":
        return f"write {word}{value}, without spaces"
    if before[-1:] == "=" and before != "=":
        return f"write {before}{word}, without spaces"
    if _num_open(before) > 0:
        parts = [before, word]
        while after and _num_open(" ".join(parts)) > 0:
            parts.append(after.pop(0))
        whole = " ".join(parts)
        if _num_open(whole) == 0 and "'" not in whole:
            return f"a value with spaces needs quotes, in a shell as '{whole}'"
    return f"write key=value, such as {example}"


def _num_open(text: str) -> int:
    """Return the number of brackets that are opened and not closed."""
    return sum(map(text.count, _OPENING)) - sum(map(text.count, _CLOSING))
