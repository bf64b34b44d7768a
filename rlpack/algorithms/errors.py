"""The error of the algorithms."""


class AlgorithmError(ValueError):
    """A choice or a column that an algorithm can't use; the text names it, what was found and the way out."""
