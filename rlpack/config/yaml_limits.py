"""Refuse YAML files whose aliases expand exponentially or without end."""

from pathlib import Path

import yaml

from rlpack.config.errors import ConfigError

MOST_VALUES = 10_000


def check_yaml_files(directory: Path) -> None:
    """Check all YAML files below a user's config directory before Hydra expands their aliases.

    Invalid YAML is left to Hydra, whose error names line and column.

    Raises:
        ConfigError: a file holds more than `MOST_VALUES` values once its aliases are expanded.
    """
    problems = [
        f"{path} holds more than {MOST_VALUES:,} values when its aliases are expanded; write it without aliases"
        for path in sorted(directory.rglob("*.yaml"))
        if _holds_too_much(path)
    ]
    if problems:
        raise ConfigError(problems)


def _holds_too_much(path: Path) -> bool:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeError):
        return False
    return root is not None and _count(root, {}) > MOST_VALUES


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return how many values `node` expands to; a cycle counts as too many."""
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = MOST_VALUES + 1  # while the node's values are counted, so that a cycle ends here
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        children = [value for _, value in node.value]
    counted[id(node)] = 1 + sum(_count(child, counted) for child in children)
    return counted[id(node)]
