"""The errors of rewards."""


class RewardError(ValueError):
    """A reward function that can't be found, called or used; the text names it, what was found and the way out."""


class TooManyFailuresError(RuntimeError):
    """Reward functions failed on more rows than `reward.max_failures` allows; the text counts them and gives one."""


class PoolError(RuntimeError):
    """The processes that run reward functions can't be had, or can't be confined as was asked for."""
