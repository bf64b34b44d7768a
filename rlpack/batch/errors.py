"""The errors of everything that holds or reads data."""


class DataError(ValueError):
    """A column, a row or a file that can't be used; the text names it, what was found and the way out."""


class MissingColumnError(DataError, KeyError):
    """A column that a batch does not have; also a `KeyError`, as mappings ask for."""

    def __str__(self) -> str:
        return str(self.args[0])
