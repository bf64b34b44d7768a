"""The errors of `rlpack.models`."""


class ModelError(ValueError):
    """An invalid model setting: a path, a config key, or an unsupported kind of model."""


class IsolationError(RuntimeError):
    """Packed sequences of a model are not independent of each other, so it must not run packed."""
