"""The errors of rewards."""


class RewardError(ValueError):
    """A reward function can't be found, called or used; the message names it, the cause and the fix."""


class TooManyFailuresError(RuntimeError):
    """Reward functions failed on more rows than `reward.max_failures` allows; the message has counts and an example."""


class PoolError(RuntimeError):
    """The processes that run reward functions can't start, or can't be confined as configured."""
