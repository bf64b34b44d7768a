"""Read from a run what `rlpack simulate RUN --async` needs: its response lengths, and the rates of its phases."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.cli.plan_from_run import read_record
from rlpack.observe.errors import ReportError
from rlpack.observe.run_dir import METRICS, read_config
from rlpack.observe.sinks import read_records
from rlpack.observe.trace import read_spans, train_steps
from rlpack.packing.analysis.running_ahead import Rates, generation_over_longest, with_mean

# A run's first steps are skipped, because they load and compile.
_SKIPPED = 2
# The values of an engine in the files of spans (`rlpack.rollout.engine_meter`).
_ENGINE = "engine"
# The parts of a step's time that are not training, with a lead and without one. ReMax's greedy responses come after the
# others.
_WAITS, _SCORING = ("time/wait_s", "time/drain_s"), ("time/reward_s", "time/greedy_s")


class RunRates(NamedTuple):
    """What a run has measured.

    Attributes:
        lengths: tokens of each response, int64 [N].
        rates: of generation, training and publication.
        train_ranks: the ranks that trained; None if the rates are not those of a run.
        token_s_of_batches: whether the time of a token was measured while one batch at a time was generated.
    """

    lengths: np.ndarray
    rates: Rates
    train_ranks: int | None = None
    token_s_of_batches: bool = False


def measured(run_dir: Path, token_s: float | None = None) -> RunRates:
    """Return response lengths and rates measured by a run, without its first steps.

    Args:
        run_dir: the run's directory.
        token_s: seconds per token of a response, if they are known; None to measure them.

    Raises:
        DataError: it has taken too few steps with generation, or doesn't tell the time per token.
    """
    record, config = read_record(run_dir), read_config(run_dir)
    taken = [one for one in read_records(run_dir / METRICS) if one["phase"] == "train"]
    counts = _rows_of_steps(run_dir, taken, len(record.lengths), config)
    chosen = [
        (one, count) for one, count in zip(taken, counts, strict=True) if one.get("rollout/response_tokens_max", 0) > 0
    ][_SKIPPED:]
    if not chosen:
        raise DataError(f"{run_dir} has no more than {_SKIPPED} steps that generate; give a longer run, or lengths")
    steps, counts = [one for one, _ in chosen], [count for _, count in chosen]
    rows = round(statistics.median(counts))
    prompt = max(
        0.0,
        statistics.median(
            one.get("packing/real_tokens", 0.0) / count - one["rollout/response_tokens_mean"] for one, count in chosen
        ),
    )
    mean = float(np.average([one["rollout/response_tokens_mean"] for one in steps], weights=counts))
    responses = with_mean(np.maximum(1, np.asarray(record.lengths, dtype=np.int64) - round(prompt)), mean)
    slots, engines = _slots_and_engines(config, rows)
    waits = _WAITS if any("rollout/lag" in one for one in steps) else ("time/generate_s", *_SCORING)
    train_s = statistics.median(
        one["time/step_s"] - sum(one.get(name, 0.0) for name in (*waits, "time/sync_s")) for one in steps
    )
    is_of_batches = token_s is None and not _is_in_flight(config)
    if token_s is None and _is_in_flight(config):
        token_s = _token_s_of_engines(run_dir, config)
    elif token_s is None:
        over_longest = generation_over_longest(responses, rows, slots * engines)
        token_s = _token_s_of_steps(run_dir, steps) / over_longest
    train_ranks = _ranks_of(config, "actor") or record.num_ranks
    rates = Rates(
        token_s=token_s,
        slots=slots,
        train_tokens_per_s=_median(steps, "packing/real_tokens") / max(train_s, 1e-9) / train_ranks,
        publish_s=_median(steps, "time/sync_s"),
        prompt_tokens=prompt,
        rows_per_step=rows,
        score_s=sum(_median(steps, name) for name in _SCORING),
    )
    return RunRates(responses, rates, train_ranks, is_of_batches)


def late_window(run_dir: Path) -> int:
    """Return `trainer.late_groups.window` of a run; 1 for anything else."""
    try:
        return max(1, int(read_config(run_dir)["trainer"]["late_groups"]["window"])) if run_dir.is_dir() else 1
    except (KeyError, TypeError, ValueError):
        return 1


def _rows_of_steps(
    run_dir: Path, taken: Sequence[Mapping[str, Any]], last: int, config: Mapping[str, Any]
) -> list[int]:
    """Return the rows of each step; with late groups, steps leave some to later ones.

    Args:
        run_dir: the run's directory.
        taken: the records of all steps.
        last: rows of the last step.
        config: the run's configuration.

    Raises:
        DataError: the run has late groups, but no configuration that gives their size.
    """
    if not any("rollout/groups_left" in one for one in taken):
        return [last] * len(taken)
    try:
        prompts, size = int(config["trainer"]["prompts_per_step"]), int(config["trainer"]["group_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{run_dir} has late groups, and no config.yaml with trainer.prompts_per_step and trainer.group_size; give "
            "a file of lengths"
        ) from error
    left = [0, *(int(one.get("rollout/groups_left", 0)) for one in taken)]
    return [max(1, size * (prompts + before - after)) for before, after in pairwise(left)]


def _is_in_flight(config: Mapping[str, Any]) -> bool:
    """Return whether a run publishes weights while responses are generated."""
    rollout = config.get("rollout")
    return isinstance(rollout, dict) and rollout.get("publish") == "in_flight"


def _token_s_of_steps(run_dir: Path, steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the median over steps of generation time divided by the tokens of the longest response.

    Raises:
        DataError: no step has a time of generation.
    """
    known = [one["time/generate_s"] / one["rollout/response_tokens_max"] for one in steps if "time/generate_s" in one]
    if not known:
        raise DataError(f"{run_dir} has no step with time/generate_s; give --token-ms")
    return statistics.median(known)


def _token_s_of_engines(run_dir: Path, config: Mapping[str, Any]) -> float:
    """Return the seconds per token of a response, from the engines' statistics.

    This is the time that responses spent in engines, summed over responses, divided by the number of their tokens.

    `time/generate_s` of a run with in_flight would be too long: a batch waits for slots behind other batches, and for
    publications.

    Raises:
        DataError: the run's spans have no statistics of engines.
    """
    try:
        processes = read_spans(run_dir)
        steps = train_steps(processes)
    except ReportError:
        processes, steps = [], []
    begin_us = steps[_SKIPPED].begin_us if len(steps) > _SKIPPED else 0
    pool = _pool_of(config, "rollout")
    windows = [
        window
        for one in processes
        for window in one.values
        if one.process.startswith(f"{pool}/") and window.name == _ENGINE and window.begin_us >= begin_us
    ]
    response_s = sum(window.values.get("running", 0.0) * window.duration_us for window in windows) / 1e6
    tokens = sum(window.values.get("tokens", 0.0) for window in windows)
    if not response_s or not tokens:
        raise DataError(
            f"{run_dir} is a run with rollout.publish=in_flight, whose time/generate_s includes waits for other "
            "batches, and its spans have no statistics of engines after the first steps; give --token-ms"
        )
    return response_s / tokens


def _slots_and_engines(config: Mapping[str, Any], rows: int) -> tuple[int, int]:
    """Return how many responses an engine of a run generates at once, and the number of engines.

    Without the run's configuration, assume one engine that generates all of them.
    """
    engines = _ranks_of(config, "rollout")
    try:
        return (rows, 1) if engines is None else (int(config["rollout"]["max_num_seqs"]), engines)
    except (KeyError, TypeError, ValueError):
        return rows, 1


def _ranks_of(config: Mapping[str, Any], role: str) -> int | None:
    """Return the ranks of a role's pool; None without the run's configuration."""
    try:
        return int(config["placement"]["pools"][_pool_of(config, role)]["ranks"])
    except (KeyError, TypeError, ValueError):
        return None


def _pool_of(config: Mapping[str, Any], role: str) -> str:
    """Return the pool of a role: its own, or else the first one."""
    try:
        placement = config["placement"]
        return str(placement["roles"].get(role, next(iter(placement["pools"]))))
    except (KeyError, TypeError, AttributeError, StopIteration):
        return "main"


def _median(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(statistics.median(one.get(name, 0.0) for one in steps))
