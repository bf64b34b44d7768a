"""Figures as they are shown."""

from collections.abc import Iterable

_SHARE, _PLAIN = "{:.1%}", "{:.3f}"


def reward_form(rewards: Iterable[float]) -> str:
    """Return the form of mean rewards: in percent where all are shares, of right answers say, and else plain.

    >>> reward_form([0.5, 1.0]).format(0.5), reward_form([0.5, 7.25]).format(0.5)
    ('50.0%', '0.500')
    """
    return _SHARE if all(0 <= reward <= 1 for reward in rewards) else _PLAIN
