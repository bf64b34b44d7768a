"""The error of rewards."""


class RewardError(ValueError):
    """A reward function that can't be found, called or used; the text names it, what was found and the way out."""
