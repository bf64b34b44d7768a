"""The error of everything that is saved or loaded."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none that is whole could be read; the text says which and why."""
