"""Refuse YAML files that grow when they are read: aliases of aliases of aliases, or an alias to itself."""

from pathlib import Path

import yaml

from rlpack.config.errors import ConfigError

MOST_VALUES = 10_000


def check_yaml_files(directory: Path) -> None:
    """Check every YAML file below a user's config directory before Hydra expands its aliases.

    Files that aren't YAML at all are left to Hydra, which names line and column.

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
    """Return how many values `node` expands to; a node inside itself counts as too many."""
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = MOST_VALUES + 1  # stands while the node's own values are counted, so a cycle finds it
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        children = [value for _, value in node.value]
    counted[id(node)] = 1 + sum(_count(child, counted) for child in children)
    return counted[id(node)]
