"""The errors of run directories, sinks and reports."""


class RunDirectoryError(ValueError):
    """The run directory can't be used; the message names the key."""


class RunTakenOverError(RuntimeError):
    """Another process has taken over the run directory."""


class MetricError(ValueError):
    """A metric that is not one number; the message names it and its value."""


class SinkError(ValueError):
    """A configured sink can't be opened; the message says what is missing."""


class SinkUnavailableError(SinkError):
    """The service of a sink can't be reached at the moment; another attempt may succeed."""


class SinkWriteError(RuntimeError):
    """Metrics can't be written during a run; the message names the file and the cause, and says what to do."""


class ReportError(ValueError):
    """A report was requested for a directory without a readable run."""


class EvaluationError(ValueError):
    """An evaluation's directory can't be used, or its run has no such checkpoint; the message names what differs."""


class StandardOutputClosedError(BrokenPipeError):
    """Standard output was closed by its reader, as in `rlpack train | head`; ends the command, as SIGPIPE would."""
