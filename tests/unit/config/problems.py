"""What is wrong with overrides, as a list of problems."""

from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError


def problems(*overrides: str) -> list[str]:
    """Return the problems of the config that these overrides compose; none if it is valid."""
    try:
        compose(overrides)
    except ConfigError as error:
        return list(error.problems)
    return []
