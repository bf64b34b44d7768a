"""The error of the algorithms."""


class AlgorithmError(ValueError):
    """An invalid option or column of an algorithm; the message names it, its value and what is allowed."""
