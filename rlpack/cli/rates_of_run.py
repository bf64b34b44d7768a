"""Read from a run what `rlpack simulate RUN --async` needs: its response lengths, and the rates of its phases."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.cli.plan_from_run import read_record
from rlpack.cli.scoring_time import overlap
from rlpack.cli.token_time import TokenTime, token_time
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import find_recipe
from rlpack.config.schema import builtin_roles
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.run_dir import METRICS, read_config
from rlpack.observe.sinks import read_records
from rlpack.packing.analysis.running_ahead import Rates, generation_over_longest, with_mean

# A run's first steps are skipped, because they load and compile.
_SKIPPED = 2
# The parts of a step's time that are not training, with a lead and without one. ReMax's greedy responses come after the
# others. Engines that share GPUs with training wake and sleep only without a lead.
_WAITS, _SCORING = ("time/wait_s", "time/drain_s"), ("time/reward_s", "time/greedy_s")
_WAKING = ("time/wake_s", "time/sleep_s")
_IN_TURNS = ("time/generate_s", *_WAKING, *_SCORING)
# Sizes of a layout, in actor.parallel.
_LAYOUT = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
# Parts of training that need no rewards, and so overlap scoring without a lead.
_BEFORE_REWARDS = ("time/logprobs_s", "time/correction_s", "time/reference_s")


class RunRates(NamedTuple):
    """What a run has measured.

    Attributes:
        lengths: tokens of each response, int64 [N].
        rates: of generation, training and publication.
        train_ranks: the ranks that trained; None if the rates are not those of a run.
        most_responses: most responses that an engine generated at a time; None if the time of a token is not measured.
        hides_scoring: some of the time of scoring is not measured, because it overlapped other work.
        has_exact_lengths: the lengths are those of responses, and not derived from rows with prompts.
    """

    lengths: np.ndarray
    rates: Rates
    train_ranks: int | None = None
    most_responses: int | None = None
    hides_scoring: bool = False
    has_exact_lengths: bool = True


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
    responses = _response_lengths(record, prompt, mean, max(one.get("rollout/response_tokens_max", 0) for one in taken))
    slots, engines = _slots_and_engines(config, rows)
    train_ranks = _ranks_of(config, "actor") or record.num_ranks
    phases = _phases(run_dir, steps)
    rates = Rates(
        slots=slots,
        train_tokens_per_s=_median(steps, "packing/real_tokens") / max(phases.train_s, 1e-9) / train_ranks,
        publish_s=_median(steps, "time/sync_s"),
        prompt_tokens=prompt,
        rows_per_step=rows,
        score_s=phases.score_s,
        share_before_rewards=min(1.0, phases.before_rewards_s / max(phases.train_s, 1e-9)),
        scores_apart=scores_apart(config),
        greedy_s=_median(steps, "time/greedy_s"),
        wake_s=sum(_median(steps, name) for name in _WAKING),
    )
    run_rates = RunRates(
        responses,
        rates,
        train_ranks,
        hides_scoring=phases.hides_scoring,
        has_exact_lengths=record.responses is not None,
    )
    if token_s is not None:
        return run_rates._replace(rates=replace(rates, token_s=token_s))
    if _is_in_flight(config):
        measured_time = _token_time_in_flight(run_dir, config)
    else:
        measured_time = _token_time_of_batches(run_dir, config, steps, responses, rates, engines)
    rates = replace(rates, token_s=measured_time.alone_s, token_s_per_response=measured_time.per_response_s)
    return run_rates._replace(rates=rates, most_responses=measured_time.most_responses)


def _response_lengths(record: PlanRecord, prompt: float, mean: float, longest: float) -> np.ndarray:
    """Return response lengths with the mean of the run, int64 [N].

    A record without response lengths gives approximate ones: those of its rows less one length for all prompts.

    Args:
        record: the lengths of a step.
        prompt: tokens of a prompt.
        mean: mean tokens of the run's responses.
        longest: tokens of its longest response.
    """
    if record.responses is None:
        lengths = np.minimum(np.asarray(record.lengths, dtype=np.int64) - round(prompt), round(longest))
    else:
        lengths = np.asarray(record.responses, dtype=np.int64)
    return np.minimum(with_mean(np.maximum(1, lengths), mean), max(1, round(longest)))


def scores_apart(config: Mapping[str, Any]) -> bool:
    """Return whether engines generate the next batch while one is scored; False without the run's configuration.

    For that, no scoring role may share a pool with the engines, nor wait for the actor's updates.
    """
    try:
        added = set(config["roles"]) - set(builtin_roles())
        scoring = {"reward", *added, *(["reward_model"] if config["reward_model"]["path"] else [])}
        draws_once = find_recipe(config["recipe"]["target"]).draws_once
    except (KeyError, TypeError, ConfigError):
        return False
    others = {pool_of(config, role) for role in ("rollout", "actor")}
    return draws_once and others.isdisjoint(pool_of(config, role) for role in scoring)


class _Phases(NamedTuple):
    """Median seconds of a step in training, in scoring after generation, and in training before the wait for rewards.

    Without a lead and without spans, scoring that overlaps training is not measured (`hides_scoring`).
    """

    train_s: float
    score_s: float
    before_rewards_s: float = 0.0
    hides_scoring: bool = False


def _phases(run_dir: Path, steps: Sequence[Mapping[str, Any]]) -> _Phases:
    """Return the times of a run's steps with generation."""
    has_lead = any("rollout/lag" in one for one in steps)
    others = (*(_WAITS if has_lead else _IN_TURNS), "time/sync_s")
    train_s = statistics.median(one["time/step_s"] - sum(one.get(name, 0.0) for name in others) for one in steps)
    waits_s = sum(_median(steps, name) for name in _SCORING)
    if has_lead:
        return _Phases(train_s, waits_s)
    measured_overlap = overlap(run_dir, _SKIPPED)
    if measured_overlap is None:
        return _Phases(train_s, waits_s, hides_scoring=any(_median(steps, name) for name in _BEFORE_REWARDS))
    score_s, before_s = waits_s + measured_overlap.scoring_s, measured_overlap.training_s
    greedy_s = _median(steps, "time/greedy_s")
    # Greedy responses, which count as scoring, are generated before training begins.
    return _Phases(train_s, score_s, min(before_s, score_s - greedy_s) if greedy_s else before_s)


def late_window(run_dir: Path) -> int:
    """Return `trainer.late_groups.window` of a run; 1 for anything else."""
    try:
        return max(1, int(config_of(run_dir)["trainer"]["late_groups"]["window"]))
    except (KeyError, TypeError, ValueError):
        return 1


def config_of(run_dir: Path) -> Mapping[str, Any]:
    """Return the configuration of a run; nothing for a path that is not a directory."""
    return read_config(run_dir) if os.path.isdir(run_dir) else {}  # false for a name that no directory can have


def gpus_of(config: Mapping[str, Any], role: str) -> float:
    """Return the GPUs of a rank of a role's pool, 0 on CPUs."""
    try:
        return float(config["placement"]["pools"][pool_of(config, role)]["gpus_per_rank"])
    except (KeyError, TypeError, ValueError):
        return 0.0


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
            f"{run_dir} has late groups, but no config.yaml with trainer.prompts_per_step and trainer.group_size; give "
            "a file of lengths"
        ) from error
    left = [0, *(int(one.get("rollout/groups_left", 0)) for one in taken)]
    return [max(1, size * (prompts + before - after)) for before, after in pairwise(left)]


def _is_in_flight(config: Mapping[str, Any]) -> bool:
    """Return whether a run publishes weights while responses are generated."""
    rollout = config.get("rollout")
    return isinstance(rollout, dict) and rollout.get("publish") == "in_flight"


def _token_time_in_flight(run_dir: Path, config: Mapping[str, Any]) -> TokenTime:
    """Return the time of a token from the engines' statistics.

    `time/generate_s` of a run with in_flight would be too long: a batch waits for slots behind other batches, and for
    publications.

    Raises:
        DataError: the run's spans have no statistics of engines.
    """
    of_engines = token_time(run_dir, pool_of(config, "rollout"), _SKIPPED)
    if of_engines is None:
        raise DataError(
            f"{run_dir} is a run with rollout.publish=in_flight, whose time/generate_s includes waits for other "
            "batches, and its spans have no statistics of engines after the first steps; give --token-ms"
        )
    return of_engines


def _token_time_of_batches(
    run_dir: Path,
    config: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    responses: np.ndarray,
    rates: Rates,
    engines: int,
) -> TokenTime:
    """Return the time of a token that gives the steps' median time of generation per token of the longest response.

    The engines' statistics give how it depends on the number of responses. They don't have the time in which requests
    are sent and returned.

    Args:
        run_dir: the run's directory.
        config: the run's configuration.
        steps: the records of steps with generation.
        responses: response lengths, int64 [N].
        rates: the run's other rates.
        engines: the run's engines.

    Raises:
        DataError: no step has a time of generation.
    """
    per_token = [
        one["time/generate_s"] / one["rollout/response_tokens_max"] for one in steps if "time/generate_s" in one
    ]
    if not per_token:
        raise DataError(f"{run_dir} has no step with time/generate_s; give --token-ms")
    most = min(rates.slots, -(-rates.rows_per_step // engines))
    shape = token_time(run_dir, pool_of(config, "rollout"), _SKIPPED) or TokenTime(1.0, 0.0, most)
    unscaled = replace(rates, token_s=shape.alone_s, token_s_per_response=shape.per_response_s)
    scale = statistics.median(per_token) / generation_over_longest(responses, rates.rows_per_step, engines, unscaled)
    return TokenTime(scale * shape.alone_s, scale * shape.per_response_s, most)


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
        return int(config["placement"]["pools"][pool_of(config, role)]["ranks"])
    except (KeyError, TypeError, ValueError):
        return None


def pool_of(config: Mapping[str, Any], role: str) -> str:
    """Return the pool of a role: its own, or else the first one."""
    try:
        placement = config["placement"]
        return str(placement["roles"].get(role, next(iter(placement["pools"]))))
    except (KeyError, TypeError, AttributeError, StopIteration):
        return "main"


def layout_divides(config: Mapping[str, Any], ranks: int) -> bool:
    """Return whether the layout of a run's actor divides a number of ranks; True without the run's configuration."""
    try:
        sizes = {name: int(config["actor"]["parallel"][name]) for name in _LAYOUT}
    except (KeyError, TypeError, ValueError):
        return True
    shared = sizes["dp_replicate"] * sizes["cp"] * sizes["tp"] * sizes["pp"]
    shards = ranks // shared if sizes["dp_shard"] == -1 else sizes["dp_shard"]
    return shared * shards == ranks and shards * sizes["cp"] % sizes["ep"] == 0


def _median(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(statistics.median(one.get(name, 0.0) for one in steps))
