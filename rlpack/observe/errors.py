"""Errors of what is written about a run."""


class RunDirectoryError(ValueError):
    """The run directory can't be used; the text says why and which key to change."""


class SinkError(ValueError):
    """A sink that was asked for can't be opened; the text names what is missing."""


class ReportError(ValueError):
    """A report was asked of a directory that holds no readable run."""
