"""Learning-rate schedules as functions of the step alone, so that a resumed run continues with the same rate."""

import math

from rlpack.config.sections.optimization import Optimizer


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of all optimizer steps in a recipe's step.

    Let w be `warmup_of(steps)` and f `min_lr_ratio`. During warm-up the rate is step / (w + 1) of the peak, so step w +
    1 has the peak rate. From there on, the fraction of the peak is a function of p = (step - w - 1) / (steps - w); the
    linear and cosine schedules would reach f one step after the last.

    - constant: 1
    - linear: f + (1 - f)·(1 - p)
    - cosine: f + (1 - f)·(1 + cos πp) / 2 (Loshchilov and Hutter 2017, arXiv:1608.03983)

    Args:
        settings: the role's optimizer section.
        step: number of the recipe's step, counted from 1.
        steps: total number of the recipe's steps.

    >>> settings = Optimizer(learning_rate=1.0, schedule="cosine", warmup_steps=1, min_lr_ratio=0.1)
    >>> [round(learning_rate(settings, step, 5), 3) for step in (1, 2, 3, 4, 5, 6)]
    [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    warmup = settings.warmup_of(steps)
    if step <= warmup:
        return settings.learning_rate * step / (warmup + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    ratio = 1.0 - (step - warmup - 1) / (steps - warmup)
    if settings.schedule == "cosine":
        ratio = (1.0 - math.cos(math.pi * ratio)) / 2
    return settings.learning_rate * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * ratio)
