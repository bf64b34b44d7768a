"""The errors of rewards."""


class RewardError(ValueError):
    """A reward function can't be found, called or used.

    The message names the function, the cause and the fix.
    """


class TooManyFailuresError(RuntimeError):
    """Reward functions failed on more rows than `reward.max_failures` allows, or gave no row a reward.

    The message has counts and an example.
    """


class PoolError(RuntimeError):
    """Reward processes can't start, or can't be confined as configured."""
