"""Errors of batches and datasets."""


class DataError(ValueError):
    """An invalid column, row or file; the message names it, its value and the fix."""


class MissingColumnError(DataError, KeyError):
    """A column that a batch does not have; also a `KeyError`, as mappings require."""

    def __str__(self) -> str:
        return str(self.args[0])
