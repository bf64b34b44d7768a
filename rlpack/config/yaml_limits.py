"""Limits on YAML files: on their kind, their nesting, their numbers, and what their aliases expand to."""

from pathlib import Path
from typing import Any

import yaml

from rlpack.config.errors import ConfigError
from rlpack.safe_files import read_text

MOST_VALUES = 10_000
MOST_LEVELS = 50
_MOST_DIGITS = 1000
_BYTE_ORDER_MARK = "\ufeff"
_NESTED = f"is nested more than {MOST_LEVELS} levels deep; write it flatter"


def check_yaml_files(directory: Path) -> None:
    """Check all YAML files below a user's config directory before Hydra reads them.

    Invalid YAML is left to Hydra, whose error names line and column.

    Raises:
        ConfigError: a file is a FIFO or a device, begins with a byte order mark, holds more than `MOST_VALUES` values
            once its aliases are expanded, or is nested too deep.
    """
    candidates = (path for path in sorted(directory.rglob("*.yaml")) if path.exists() and not path.is_dir())
    if problems := [f"{path} {problem}" for path in candidates if (problem := _problem(path))]:
        raise ConfigError(problems)


def read_yaml(path: Path) -> Any:
    """Return the value in a YAML file.

    Raises:
        ConfigError: it isn't YAML in UTF-8, or exceeds a limit.
        OSError: it can't be read.
    """
    if problem := _problem(path):
        raise ConfigError([f"{path} {problem}"])
    try:
        return yaml.safe_load(read_text(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"{path} is not a valid YAML file: {error}"]) from error


def _problem(path: Path) -> str | None:
    """Return which limit a file exceeds, or None."""
    root = None
    try:
        text = read_text(path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except RecursionError:
        return _NESTED
    except (yaml.YAMLError, ValueError):
        text = ""
    if text.startswith(_BYTE_ORDER_MARK):
        return "begins with a byte order mark; save the file as UTF-8 without it"
    if root is not None and _count(root, {}) > MOST_VALUES:
        return f"holds more than {MOST_VALUES:,} values when its aliases are expanded; write it without aliases"
    return None if root is None else _problem_of_nodes(root)


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return how many values `node` expands to; a cycle counts as too many."""
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = MOST_VALUES + 1  # while the node's values are counted, so that a cycle ends here
    counted[id(node)] = 1 + sum(_count(child, counted) for child in _children(node))
    return counted[id(node)]


def _problem_of_nodes(root: yaml.Node) -> str | None:
    """Return what no reader can take of at most `MOST_VALUES` nodes, or None."""
    level = [root]
    for _ in range(MOST_LEVELS + 1):
        if not level:
            return None
        for node in level:
            if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
                line = node.start_mark.line + 1
                return f"has a number of {len(node.value):,} digits in line {line}; the limit is {_MOST_DIGITS:,}"
        level = [child for node in level for child in _children(node)]
    return _NESTED


def _children(node: yaml.Node) -> list[yaml.Node]:
    """Return the values of a sequence or a mapping."""
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return node.value if isinstance(node, yaml.SequenceNode) else []
