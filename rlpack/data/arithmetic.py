"""The built-in task: add digits modulo 10, step by step, to the right total.

A prompt labels its digits with letters, `a3b2c3=`. The answer repeats each letter and digit followed by the running
total modulo 10, and ends with the last total: `a33b25c38#8`. Lengths are geometric, as uneven as in real data: most
answers are short, a few are many times as long.

Demonstrations have errors on purpose: each total is one too high with probability `noise`, and later steps continue
from it. By default most steps are wrong, and 6 % of the demonstrations end with the right total. A model trained on
them makes the same errors, most often with greedy decoding; reinforcement learning with the verifiable reward finds the
answers that few demonstrations show.
"""

import string
import zlib
from dataclasses import dataclass, fields

import numpy as np

from rlpack.batch.errors import DataError

ALPHABET = string.ascii_lowercase + string.digits + "=#"
_SPLITS = {"train": 0, "validation": 1}
_HELD_OUT = 8  # one of this many prompts belongs to the held-out split
_MOST_ROWS = 10_000_000
_MAX_OPERANDS = len(string.ascii_lowercase)


@dataclass(frozen=True)
class ArithmeticTask:
    """The arguments of `data.generator`.

    Attributes:
        train_size: rows of the training split.
        validation_size: rows of the held-out split.
        min_operands: minimum number of digits of a prompt.
        max_operands: maximum number of digits of a prompt, at most 26 (one letter each).
        mean_operands: mean number of digits before `max_operands` cuts the geometric distribution.
        largest_operand: operands are from 0 to this digit.
        noise: probability that a step of a demonstration is one too high.

    Raises:
        DataError: a value is out of range.
    """

    train_size: int = 16384
    validation_size: int = 256
    min_operands: int = 2
    max_operands: int = 26
    mean_operands: float = 5.0
    largest_operand: int = 3
    noise: float = 0.6

    def __post_init__(self) -> None:
        """Check all values against their limits."""
        limits = {
            "train_size": (1, _MOST_ROWS),
            "validation_size": (1, _MOST_ROWS),
            "min_operands": (1, _MAX_OPERANDS),
            "max_operands": (self.min_operands, _MAX_OPERANDS),
            "mean_operands": (self.min_operands, _MAX_OPERANDS),
            "largest_operand": (1, 9),
            "noise": (0.0, 1.0),
        }
        for field in fields(self):
            value, (low, high) = getattr(self, field.name), limits[field.name]
            kind = float if field.name in ("mean_operands", "noise") else int
            if isinstance(value, bool) or not isinstance(value, (int, kind)) or not low <= value <= high:
                raise DataError(
                    f"data.generator.{field.name} is {value!r}; it must be a number from {low:g} to {high:g}"
                )


def generate(split: str, *, seed: int, task: ArithmeticTask) -> dict[str, list[str]]:
    """Return the columns `prompt`, `answer` and `demonstration` of a split.

    Rows depend only on (seed, split). A checksum of seed and prompt decides the split of a prompt, so the splits are
    disjoint and one in eight prompts of every length is held out. Holding out a sample of rows instead could remove all
    of the few short prompts from training.

    >>> rows = generate("validation", seed=1, task=ArithmeticTask(validation_size=1, noise=0.0))
    >>> solve(rows["prompt"][0]) == rows["demonstration"][0]
    True
    """
    if split not in _SPLITS:
        raise DataError(
            f"the built-in task has no split {split!r}; set data.split or data.validation_split to train or validation"
        )
    size = task.validation_size if split == "validation" else task.train_size
    prompts = _draw_prompts(split, size, seed, task)
    rng = np.random.default_rng((seed, _SPLITS[split], 1))
    demonstrations = [solve(prompt, errors=_draw_errors(rng, len(prompt) // 2, task.noise)) for prompt in prompts]
    return {
        "prompt": prompts,
        "answer": [solve(prompt)[-1] for prompt in prompts],
        "demonstration": demonstrations,
    }


def solve(prompt: str, errors: np.ndarray | None = None) -> str:
    """Return the full answer of a prompt, modulo 10.

    `errors` (int, one per digit) are added to the totals.

    >>> solve("a7b4c8=")
    'a77b41c89#9'
    """
    letters, digits = prompt[0:-1:2], prompt[1:-1:2]
    steps = np.fromiter(map(int, digits), dtype=np.int64) + (0 if errors is None else errors)
    totals = np.cumsum(steps) % 10
    worked = "".join(f"{letter}{digit}{total}" for letter, digit, total in zip(letters, digits, totals, strict=True))
    return f"{worked}#{totals[-1]}"


def _draw_errors(rng: np.random.Generator, count: int, noise: float) -> np.ndarray:
    """Return 1 for each step with an error, else 0.

    All errors have the same sign, so that two never cancel.
    """
    return (rng.random(count) < noise).astype(np.int64)


def _draw_prompts(split: str, size: int, seed: int, task: ArithmeticTask) -> list[str]:
    """Return `size` prompts of the split."""
    rng = np.random.default_rng((seed, _SPLITS[split], 0))
    prompts: list[str] = []
    for _ in range(100 * size):
        if len(prompts) == size:
            return prompts
        count = task.min_operands - 1 + rng.geometric(1 / (task.mean_operands - task.min_operands + 1))
        digits = rng.integers(0, task.largest_operand + 1, size=min(count, task.max_operands))
        prompt = (
            "".join(f"{letter}{digit}" for letter, digit in zip(string.ascii_lowercase, digits, strict=False)) + "="
        )
        if _split_of(prompt, seed) == split:
            prompts.append(prompt)
    raise DataError(f"only {len(prompts)} of {size} {split} prompts could be drawn; raise data.generator.max_operands")


def _split_of(prompt: str, seed: int) -> str:
    """Return the split that a prompt belongs to."""
    return "train" if zlib.crc32(f"{seed}:{prompt}".encode()) % _HELD_OUT else "validation"
