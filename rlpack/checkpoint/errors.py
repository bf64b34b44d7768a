"""The error of saving and loading."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""
