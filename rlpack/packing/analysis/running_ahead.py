"""Forecast a run that generates ahead of training (`trainer.lead`), from measured rates.

Each slot of an engine generates one response at a time. A token takes `token_s` seconds, and `token_s_per_response`
more for each other response in the engine. The responses of a batch take free slots in order, and the batch is complete
when its last response has a reward. Training takes time proportional to the tokens per rank. In turns, scoring overlaps
the part of it that needs no rewards. Weights are then published, during which the engines pause. With drain, they are
published once the next batch is scored, or generated if scoring roles have pools of their own. `lead` and the two ways
to publish mean the same as in a run (`rlpack.recipes.driver.ahead`).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np

from rlpack.packing.analysis.engine_schedule import Engines, ResponseBatch
from rlpack.packing.errors import PackingError

Publish = Literal["drain", "in_flight"]
# At least this many first steps, which fill the pipeline, are not counted.
_WARM_UP = 5
_MAY_BE_ZERO = frozenset(
    {
        "token_s_per_response",
        "publish_s",
        "prompt_tokens",
        "score_s",
        "share_before_rewards",
        "scores_apart",
        "greedy_s",
        "wake_s",
    }
)


@dataclass(frozen=True)
class Rates:
    """The measured rates of a run.

    Attributes:
        token_s: seconds per token of a response that is alone in its engine.
        token_s_per_response: seconds per token that each other response in the engine adds.
        slots: responses that an engine generates concurrently.
        train_tokens_per_s: tokens per second, prompts included, that a rank trains on, over all passes and updates.
        publish_s: seconds per weight publication.
        prompt_tokens: mean length of a prompt in tokens.
        rows_per_step: responses per step.
        score_s: seconds from the last sampled response of a batch to its last reward.
        share_before_rewards: share of training that needs no rewards, such as the old-log-prob pass.
        scores_apart: whether scoring roles have pools of their own, so that engines get new weights, and generate the
            next batch, while one is scored.
        greedy_s: the part of `score_s` in which engines generate greedy responses, as for ReMax.
        wake_s: seconds of a step in which engines that share GPUs with training wake and fall asleep, in turns only.

    Raises:
        PackingError: a value is out of range.
    """

    token_s: float = 0.02
    token_s_per_response: float = 0.0
    slots: int = 256
    train_tokens_per_s: float = 10_000.0
    publish_s: float = 1.0
    prompt_tokens: float = 128.0
    rows_per_step: int = 256
    score_s: float = 0.0
    share_before_rewards: float = 0.0
    scores_apart: bool = False
    greedy_s: float = 0.0
    wake_s: float = 0.0

    def __post_init__(self) -> None:
        """Check every value."""
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in _MAY_BE_ZERO
            if not np.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise PackingError(
                    f"{field.name} is {value:g}; it has to be finite and {'at least' if may_be_zero else 'above'} 0"
                )


class Setup(NamedTuple):
    """How a run uses its ranks.

    Attributes:
        lead: how many steps ahead a batch may be started; with 0, all ranks generate and then all train.
        publish: when weights reach engines.
        engine_ranks: ranks that generate; each has one engine.
        train_ranks: ranks that train.
    """

    lead: int
    publish: Publish
    engine_ranks: int
    train_ranks: int

    def pause_s(self, rates: Rates) -> float:
        """Return the seconds of a step in which weights are published, and engines wake and fall asleep."""
        return rates.publish_s + (0.0 if self.lead else rates.wake_s)

    def responses_in_flight(self, rates: Rates) -> int:
        """Return the most responses that are in the engines or wait for them: those of all batches in flight."""
        return rates.rows_per_step * (self.lead + 1 if self.publish == "in_flight" else 1)

    def responses_of_an_engine(self, rates: Rates) -> int:
        """Return the most responses that an engine generates at a time."""
        return min(rates.slots, -(-self.responses_in_flight(rates) // self.engine_ranks))


class RunForecast(NamedTuple):
    """The expected performance of a setup.

    Attributes:
        step_s: seconds per step.
        training_idle: share of their time that training ranks spend waiting.
        engines_idle: share of their time that the engines' slots spend idle; slots beyond the responses of the batches
            that may be in flight don't count.
        staleness_mean: mean number of publications between a response's first token and its training.
        staleness_max: maximum of the same number.
    """

    step_s: float
    training_idle: float
    engines_idle: float
    staleness_mean: float
    staleness_max: int


def forecast_run(lengths: np.ndarray, rates: Rates, setup: Setup, *, steps: int = 60, seed: int = 0) -> RunForecast:
    """Return the expected performance of a setup.

    With a lead, batches that start together may end together, in rounds of `lead` + 1 steps. So the steps that count
    are whole rounds, which begin after the first one and during which batches are started as in a long run.

    Args:
        lengths: response lengths to draw from, in tokens, int64 [n].
        rates: the measured rates of the run.
        setup: how the run uses its ranks.
        steps: least number of steps that count.
        seed: random seed for drawing lengths.

    Raises:
        PackingError: the setup can't run: no ranks, a lead of several steps with drain, or a negative one.
    """
    _check(setup)
    draws = np.random.default_rng(seed)
    round_steps = setup.lead + 1
    warm_up = max(_WARM_UP, round_steps)
    counted_steps = round_steps * max(2, -(-steps // round_steps))
    rows = [draws.choice(lengths, rates.rows_per_step) for _ in range(warm_up + counted_steps + round_steps)]
    train_s = [
        float(batch.sum() + rates.prompt_tokens * batch.size) / (rates.train_tokens_per_s * setup.train_ranks)
        for batch in rows
    ]
    slots = min(setup.engine_ranks * rates.slots, setup.responses_in_flight(rates))
    engines = Engines(setup.engine_ranks, rates.slots, rates.token_s, rates.token_s_per_response)
    waiting: deque[ResponseBatch] = deque()
    now = waited_s = began = busy_s = 0.0
    published: list[float] = []
    lags: list[np.ndarray] = []
    started = 0
    for step in range(warm_up + counted_steps):
        if step == warm_up:
            began, waited_s, busy_s = now, 0.0, engines.busy_until(now)
            lags.clear()
        last = step + (setup.lead if setup.publish == "in_flight" else 0)
        while started <= last:
            waiting.append(engines.add(now, rows[started]))
            started += 1
        batch, begins = waiting.popleft(), now
        scored = engines.finish(batch) + _wait_for_scores_s(rates, setup, train_s[step])
        waited_s += max(0.0, scored - now)
        now = max(now, scored)
        lags.append(len(published) - np.searchsorted(published, batch.starts, side="right"))
        if setup.publish == "drain" and setup.lead:
            waiting.append(engines.add(begins if rates.scores_apart else now, rows[started]))
            started += 1
        now += train_s[step]
        if setup.publish == "drain" and waiting:
            drawn = engines.finish(waiting[-1]) + (rates.greedy_s if rates.scores_apart else rates.score_s)
            waited_s += max(0.0, drawn - now)
            now = max(now, drawn)
        engines.pause(now, setup.pause_s(rates))
        published.append(now + rates.publish_s)
        now += setup.pause_s(rates)
    span = now - began
    staleness = np.concatenate(lags)
    return RunForecast(
        step_s=span / counted_steps,
        training_idle=waited_s / span,
        engines_idle=max(0.0, 1 - (engines.busy_until(now) - busy_s) / (span * slots)),
        staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()),
    )


def _wait_for_scores_s(rates: Rates, setup: Setup, train_s: float) -> float:
    """Return the seconds from a batch's last response to its last reward in which a step waits for nothing else.

    With a lead, all of a batch is scored before a step takes it.
    """
    overlap_s = 0.0 if setup.lead else rates.share_before_rewards * train_s
    return max(0.0, rates.score_s - overlap_s)


def generation_over_longest(
    lengths: np.ndarray, rows: int, engines: int, rates: Rates, *, batches: int = 50, seed: int = 0
) -> float:
    """Return the mean generation time of batches, each divided by the tokens of its longest response.

    Args:
        lengths: response lengths to draw from, in tokens, int64 [n].
        rows: responses of a batch.
        engines: number of engines.
        rates: the time of a token, and the slots of an engine.
        batches: number of batches to draw.
        seed: random seed for drawing lengths.

    >>> generation_over_longest(np.array([10]), 6, 1, Rates(token_s=1.0, slots=2))
    3.0
    """
    draws = np.random.default_rng(seed)
    drawn = [draws.choice(lengths, rows) for _ in range(batches)]
    times = []
    for batch in drawn:
        pool = Engines(engines, rates.slots, rates.token_s, rates.token_s_per_response)
        times.append(pool.finish(pool.add(0.0, batch)) / batch.max())
    return float(np.mean(times))


def with_mean(lengths: np.ndarray, mean: float, *, size: int = 4096) -> np.ndarray:
    """Resample lengths, favoring long or short ones, so that they have a given mean.

    A single batch of few responses may have more or fewer long ones than the run as a whole. Each length is weighted by
    an exponential of itself: of all distributions with this mean, the result is the closest to the original in KL
    divergence. If the mean is outside their range, which no weights can change, lengths are scaled to it instead.

    Args:
        lengths: int64 [n].
        mean: the mean of the run.
        size: number of lengths to return.

    Returns:
        Lengths of at least 1 in ascending order, int64 [size].
    """
    values = np.sort(lengths).astype(np.float64)
    if not values[0] < mean < values[-1]:
        scaled = values[np.arange(size) * values.size // size] * (mean / values.mean())
        # Differences of rounded sums keep the mean, which rounding each length would shift.
        return np.maximum(1, np.diff(np.rint(np.cumsum(scaled)), prepend=0)).astype(np.int64)
    centered = (values - mean) / (values[-1] - values[0])
    low, high, weights = -200.0, 200.0, np.ones_like(values)
    for _ in range(100):
        middle = (low + high) / 2
        exponents = middle * centered
        weights = np.exp(exponents - exponents.max())
        low, high = (middle, high) if (weights * centered).sum() < 0 else (low, middle)
    shares = np.cumsum(weights) / weights.sum()
    places = np.searchsorted(shares, (np.arange(size) + 0.5) / size)
    return np.sort(lengths)[np.minimum(places, lengths.size - 1)]


def setups(ranks: int, leads: tuple[int, ...]) -> Iterator[Setup]:
    """Yield the setups for a number of ranks: with lead 0, all ranks take turns at both tasks; else they are split."""
    for lead in leads:
        if lead == 0:
            yield Setup(0, "drain", ranks, ranks)
            continue
        splits = sorted({round(split) for split in np.linspace(1, ranks - 1, min(ranks - 1, 15))})
        for publish in ("drain", "in_flight") if lead == 1 else ("in_flight",):
            yield from (Setup(lead, publish, split, ranks - split) for split in splits)


def _check(setup: Setup) -> None:
    """Raise a `PackingError` for a setup that can't run."""
    if min(setup.engine_ranks, setup.train_ranks) < 1:
        raise PackingError(f"{setup.engine_ranks} ranks generate and {setup.train_ranks} train; each needs 1 or more")
    if setup.lead < 0 or (setup.publish == "drain" and setup.lead > 1):
        raise PackingError(f"the lead is {setup.lead}; it has to be 0 or 1 with drain, and 1 or more with in_flight")
    if setup.publish == "in_flight" and setup.lead == 0:
        raise PackingError("the lead is 0, with which nothing is in flight; it has to be 1 or more with in_flight")
