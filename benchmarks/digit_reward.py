"""A reward that differs among the responses of almost any policy: the share of digits."""


def digits(completion: str) -> float:
    """Return the share of a response's characters that are digits; 0 for an empty one.

    >>> digits("1a2b")
    0.5
    """
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
