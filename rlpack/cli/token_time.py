"""How long engines of a run took for a token, and how that depends on the number of their responses."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlpack.observe.errors import ReportError
from rlpack.observe.trace import Values, read_spans, train_steps

# The values of an engine in the files of spans (`rlpack.rollout.engine_meter`).
_ENGINE = "engine"
# Least standard deviation of the number of responses, as a share of its mean, that shows how the time depends on it.
_LEAST_SPREAD = 0.2


class TokenTime(NamedTuple):
    """The time of a token.

    Attributes:
        alone_s: seconds per token of a response that is alone in its engine.
        per_response_s: seconds per token that each other response in the engine adds.
        most_responses: most responses that an engine generated at a time in a window of the measurement.
    """

    alone_s: float
    per_response_s: float
    most_responses: int


def token_time(run_dir: Path, pool: str, skipped: int) -> TokenTime | None:
    """Return the time of a token from the statistics of a run's engines.

    A run's spans have, for each window of time, the mean number of responses in an engine and their tokens, and so the
    time of an iteration. A line is fitted to it over the number of responses, by least squares with the number of
    iterations as weights, so that the time of all windows together is that of the run. Its values at 0 and its slope
    are at least 0. If the number of responses hardly changes, the time is taken as constant.

    Args:
        run_dir: the run's directory.
        pool: the pool of the engines.
        skipped: the first steps, which don't count.

    Returns:
        None if the run has no such statistics.
    """
    windows = _windows(run_dir, pool, skipped)
    busy = [window for window in windows if min(window.values.get(name, 0.0) for name in ("running", "tokens")) > 0]
    if not busy:
        return None
    responses = np.array([window.values["running"] for window in busy])
    iterations = np.array([window.values["tokens"] for window in busy]) / responses
    seconds = np.array([window.duration_us for window in busy]) / 1e6
    at_none_s, per_response_s = _line(responses, seconds / iterations, iterations)
    return TokenTime(at_none_s + per_response_s, per_response_s, int(np.ceil(responses.max())))


def _windows(run_dir: Path, pool: str, skipped: int) -> Sequence[Values]:
    """Return the windows of all engines after the first steps.

    The `hf` engine records no waiting rows. Its windows are whole batches, during which the number of responses falls,
    so they don't show how the time of a token depends on it, and are left out.
    """
    try:
        processes = read_spans(run_dir)
        steps = train_steps(processes)
    except ReportError:
        return []
    begin_us = steps[skipped].begin_us if len(steps) > skipped else 0
    return [
        window
        for one in processes
        for window in one.values
        if one.process.startswith(f"{pool}/") and window.name == _ENGINE and window.begin_us >= begin_us
        if "waiting" in window.values
    ]


def _line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the intercept and the slope, both at least 0, of the line that fits best.

    >>> _line(np.array([1.0, 2.0, 4.0]), np.array([5.0, 7.0, 11.0]), np.ones(3))
    (3.0, 2.0)
    """
    mean_x, mean_y = (float(np.average(values, weights=weights)) for values in (x, y))
    variance = float(np.average((x - mean_x) ** 2, weights=weights))
    if variance < (_LEAST_SPREAD * mean_x) ** 2:
        return mean_y, 0.0
    slope = float(np.average((x - mean_x) * (y - mean_y), weights=weights)) / variance
    # Through the weighted means, which a line through the origin and a horizontal one also pass.
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return mean_y - slope * mean_x, slope
