"""How long a run without a lead scored its batches while it did other work."""

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlpack.observe.errors import ReportError
from rlpack.observe.trace import DRIVER, MAIN_THREAD, Span, read_spans, train_steps

# Timers of `rlpack.recipes.driver`.
_GENERATION, _DRAW, _WAIT = frozenset({"generate", "greedy"}), frozenset({"generate", "greedy", "sleep"}), "reward"


class Overlap(NamedTuple):
    """What a step does between the generation of its batch and the wait for its rewards.

    Attributes:
        scoring_s: seconds of scoring in that time, which `time/reward_s` leaves out.
        training_s: seconds of training in that time, such as the old-log-prob pass.
    """

    scoring_s: float
    training_s: float


def overlap(run_dir: Path, skipped: int) -> Overlap | None:
    """Return the medians over a run's steps, from its spans.

    Args:
        run_dir: the run's directory.
        skipped: the first steps, which don't count.

    Returns:
        None if the run has no spans of steps with generation and scoring.
    """
    try:
        processes = read_spans(run_dir)
    except ReportError:
        return None
    driver = [span for one in processes if one.process == DRIVER for span in one.spans if span.thread == MAIN_THREAD]
    scoring = [span for one in processes for span in one.spans if span.kind == "scoring"]
    own, scores = sorted(driver, key=_begin_us), sorted(scoring, key=_begin_us)
    of_steps = [_of_step(_within(step, own), _within(step, scores)) for step in train_steps(processes)[skipped:]]
    measured = [found for found in of_steps if found is not None]
    if not measured:
        return None
    return Overlap(*(statistics.median(values) for values in zip(*measured, strict=True)))


def _of_step(own: Sequence[Span], scoring: Sequence[Span]) -> Overlap | None:
    """Return the overlap of a step, from the spans of the driver and of scoring."""
    generated_us = _last_end_us(span for span in own if span.name in _GENERATION)
    waits_us = [span.begin_us for span in own if span.name == _WAIT and span.begin_us >= generated_us]
    if not generated_us or not waits_us or not scoring:
        return None
    wait_us, drawn_us = min(waits_us), _last_end_us(span for span in own if span.name in _DRAW)
    scored_us = min(wait_us, _last_end_us(scoring))
    return Overlap(max(0, scored_us - generated_us) / 1e6, max(0, wait_us - drawn_us) / 1e6)


def _within(step: Span, spans: Sequence[Span]) -> Sequence[Span]:
    """Return the spans, of sorted ones, that begin within a step."""
    return spans[bisect_left(spans, step.begin_us, key=_begin_us) : bisect_left(spans, step.end_us, key=_begin_us)]


def _last_end_us(spans: Iterable[Span]) -> int:
    return max((span.end_us for span in spans), default=0)


def _begin_us(span: Span) -> int:
    return span.begin_us
