"""The error that planning raises."""


class PackingError(ValueError):
    """Invalid lengths, budget or options.

    The message names the value, the limit and the fix.
    """
