"""The learning rate as a function of the step alone, so that a resumed run goes on with the same one."""

import math

from rlpack.config.sections.optimization import Optimizer


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Return the rate of all optimizer steps in a recipe's step.

    With w = `warmup_steps` it rises in a line, step / (w + 1) of the whole, which step w + 1 has. From there it stays,
    or falls over what is left, p = (step - w - 1) / (steps - w), towards the floor f, which the step after the last
    would have: linear f + (1 - f)·(1 - p), cosine f + (1 - f)·(1 + cos πp) / 2 (Loshchilov and Hutter 2017,
    arXiv:1608.03983).

    Args:
        settings: the role's section.
        step: of the recipe, from 1.
        steps: that the recipe takes in all.

    >>> settings = Optimizer(learning_rate=1.0, schedule="cosine", warmup_steps=1, min_lr_ratio=0.1)
    >>> [round(learning_rate(settings, step, 5), 3) for step in (1, 2, 3, 4, 5, 6)]
    [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    rise = settings.warmup_steps
    if step <= rise:
        return settings.learning_rate * step / (rise + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    left = 1.0 - (step - rise - 1) / (steps - rise)
    if settings.schedule == "cosine":
        left = (1.0 - math.cos(math.pi * left)) / 2
    return settings.learning_rate * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)
