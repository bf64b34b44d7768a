"""Errors of configuration."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """An invalid configuration: one line per problem, with the given value and the key to change.

    >>> print(ConfigError(["seed is -1; it has to be at least 0", "steps is not a key"]))
    seed is -1; it has to be at least 0
    steps is not a key
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        """Rebuild from the problems, so that the error pickles."""
        return type(self), (self.problems,)


def to_config_error(problem: str) -> ConfigError:
    """Return the error of a single problem."""
    return ConfigError([problem])
