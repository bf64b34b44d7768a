"""Sort rows by whole numbers, faster than NumPy's own stable sort of int64."""

import numpy as np

# NumPy sorts 16-bit numbers by radix, in linear time; wider ones go digit by digit, the lowest first.
_DIGIT = 16


def ascending(values: np.ndarray) -> np.ndarray:
    """Return rows from the smallest value to the largest, int64 [B]; rows alike keep their order.

    >>> ascending(np.array([3, 0, 2**40, 0])).tolist()
    [1, 3, 0, 2]

    Args:
        values: whole numbers of at least 0, int64 [B].
    """
    highest = int(values.max(initial=0))
    order = np.argsort(values.astype(np.uint16), kind="stable")
    for shift in range(_DIGIT, highest.bit_length(), _DIGIT):
        digits = (values >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def decreasing(values: np.ndarray) -> np.ndarray:
    """Return rows from the largest value to the smallest, int64 [B]; rows alike keep their order.

    >>> decreasing(np.array([3, 5, 3])).tolist()
    [1, 0, 2]
    """
    return ascending(int(values.max(initial=0)) - values)
