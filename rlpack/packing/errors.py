"""The error that planning raises."""


class PackingError(ValueError):
    """Invalid lengths, budget or options; the message names the value, the limit and the fix."""
