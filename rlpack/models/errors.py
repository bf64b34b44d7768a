"""The errors of `rlpack.models`."""


class ModelError(ValueError):
    """What a user wrote about a model can't be: a path, a config key, a kind of model that is not supported."""


class IsolationError(RuntimeError):
    """A model's packed sequences are not independent of each other, so it may not be trained packed."""
