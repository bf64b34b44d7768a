"""The results of an evaluation: means over prompts, each with a bootstrap interval, from the rows of samples.jsonl."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.observe.evaluation.bootstrap import CONFIDENCE, bootstrap_intervals
from rlpack.observe.evaluation.pass_at_k import default_k, pass_at_k, passing
from rlpack.observe.evaluation.sample_rows import SampleRow

_NO_PASSES = "undefined: rewards are not all 0 or 1; set evaluate.threshold"


@dataclass(frozen=True)
class Statistic:
    """A mean over prompts.

    Attributes:
        name: such as `mean_reward` or `pass@4`.
        value: the mean.
        low: lower end of its 95 % interval.
        high: upper end.
    """

    name: str
    value: float
    low: float
    high: float


@dataclass
class PromptRewards:
    """The rewards of an evaluation, collected row by row; NaN where a response has none.

    A response without a reward counts as 0 in means. It never passes, never votes and is never the best of n, even if
    all other rewards are negative.

    Attributes:
        sampled: rewards of each prompt's samples, P lists of n.
        greedy: rewards of the greedy responses, P or none.
        voted: the mean reward of each prompt's majority answers, P; 0 if no winner has a reward.
        counts: rows, rows without a reward, truncated rows, and tokens.
    """

    sampled: list[list[float]] = field(default_factory=list)
    greedy: list[float] = field(default_factory=list)
    voted: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("rows", "without_reward", "truncated", "response_tokens"), 0)
    )

    def add(self, rows: Sequence[SampleRow], winners: Sequence[int]) -> None:
        """Add the rows of one prompt.

        Args:
            rows: its samples, then its greedy response if there is one.
            winners: indices of the samples whose answers won the majority vote.
        """
        samples = [_reward(row) for row in rows if row.sample is not None]
        self.sampled.append(samples)
        self.greedy += [_reward(row) for row in rows if row.sample is None]
        won = [samples[winner] for winner in winners if not math.isnan(samples[winner])]
        self.voted.append(float(np.mean(won)) if won else 0.0)
        self.counts["rows"] += len(rows)
        self.counts["without_reward"] += sum(row.reward is None for row in rows)
        self.counts["truncated"] += sum(row.finish_reason == "length" for row in rows)
        self.counts["response_tokens"] += sum(row.response_tokens for row in rows)

    def statistics(self, settings: Evaluate, seed: int) -> tuple[list[Statistic], float | None]:
        """Return all statistics, and the minimum reward of a passing response; None if that is undefined."""
        rewards = np.array(self.sampled, dtype=np.float64)
        columns = {"mean_reward": np.nan_to_num(rewards).mean(1), "best_of_n": _best(rewards)}
        passes = passing(rewards, self.greedy, settings.threshold)
        if passes is not None:
            columns |= {f"pass@{k}": pass_at_k(passes, k) for k in settings.pass_at or default_k(settings.samples)}
        columns["majority_vote"] = np.array(self.voted)
        if self.greedy:
            columns["greedy_mean"] = np.nan_to_num(np.array(self.greedy))
        values = np.stack(list(columns.values()), axis=1)
        intervals = bootstrap_intervals(values, resamples=settings.resamples, seed=seed).tolist()
        means = values.mean(0).tolist()
        triples = zip(columns, means, intervals, strict=True)
        threshold = (1.0 if settings.threshold is None else settings.threshold) if passes is not None else None
        return [Statistic(name, mean, *interval) for name, mean, interval in triples], threshold


def _reward(row: SampleRow) -> float:
    return math.nan if row.reward is None else row.reward


def _best(rewards: np.ndarray) -> np.ndarray:
    """Return the highest reward of each prompt's responses, float64 [P]; 0 for a prompt without any.

    >>> _best(np.array([[-2.0, -1.0, np.nan], [np.nan, np.nan, np.nan]])).tolist()
    [-1.0, 0.0]
    """
    has_any = ~np.isnan(rewards).all(1)
    return np.where(has_any, np.where(np.isnan(rewards), -np.inf, rewards).max(1), 0.0)


def by_prompt(rows: Iterable[SampleRow], rows_per_prompt: int) -> Iterable[list[SampleRow]]:
    """Yield the rows of each prompt."""
    group: list[SampleRow] = []
    for row in rows:
        group.append(row)
        if len(group) == rows_per_prompt:
            yield group
            group = []


def results_document(
    evaluated: dict[str, Any],
    rewards: PromptRewards,
    settings: Evaluate,
    *,
    seed: int,
    majority_by: str,
    failures: Mapping[str, int],
) -> dict[str, Any]:
    """Return the contents of results.json: the model, the statistics, counts, and `failures` of engines.

    Nothing depends on time.
    """
    statistics, threshold = rewards.statistics(settings, seed)
    counts = rewards.counts
    return {
        **evaluated,
        "seed": seed,
        "prompts": len(rewards.sampled),
        "samples": settings.samples,
        "statistics": {one.name: {"value": one.value, "low": one.low, "high": one.high} for one in statistics},
        "confidence": CONFIDENCE,
        "resamples": settings.resamples,
        "majority_vote_by": majority_by,
        "passes_from_reward": threshold,
        "responses": counts["rows"],
        "responses_without_reward": counts["without_reward"],
        "truncated_fraction": counts["truncated"] / counts["rows"],
        "response_tokens_mean": counts["response_tokens"] / counts["rows"],
        **failures,
    }


def page_title(document: dict[str, Any]) -> str:
    """Return what was evaluated in a few words: of paths, only the last parts.

    >>> page_title({"checkpoint": "/home/me/runs/mine/checkpoints/train/step-7", "data": "/home/me/prompts.jsonl"})
    'mine, step 7, on prompts.jsonl'
    >>> page_title({"checkpoint": None, "model": "Qwen/Qwen3-0.6B", "data": "arithmetic"})
    'Qwen/Qwen3-0.6B on arithmetic'
    """
    data = Path(document["data"]).name
    if document["checkpoint"] is None:
        return f"{'/'.join(Path(document['model']).parts[-2:])} on {data}"
    checkpoint = Path(document["checkpoint"])
    phase = "warm-up step" if checkpoint.parent.name == "sft_warmup" else "step"
    return f"{checkpoint.parents[2].name}, {phase} {checkpoint.name.removeprefix('step-')}, on {data}"


def page_sources(document: dict[str, Any]) -> str:
    """Return the full paths, or names, of model and data."""
    name = "model" if document["checkpoint"] is None else "checkpoint"
    return f"{name} {document[name]}; split {document['split']} of {document['data']}"


def result_lines(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of the table that is printed: name, value, interval."""
    return [
        (
            name.replace("_", " ").replace("of n", f"of {document['samples']}"),
            f"{one['value']:.4f}",
            f"[{one['low']:.4f}, {one['high']:.4f}]",
        )
        for name, one in document["statistics"].items()
    ]


def result_notes(document: dict[str, Any]) -> list[str]:
    """Return the lines below the table: how many responses there are, how votes and passes were counted, and so on."""
    threshold, without = document["passes_from_reward"], document["responses_without_reward"]
    prompts, samples, responses = document["prompts"], document["samples"], document["responses"]
    greedy = f" and {responses - prompts * samples:,} greedy ones" if responses > prompts * samples else ""
    notes = [f"{responses:,} responses: {prompts:,} prompts × {samples} samples{greedy}"]
    notes.append(f"majority vote by {document['majority_vote_by']}")
    notes.append(
        f"pass@k: {_NO_PASSES}" if threshold is None else f"a response passes if its reward is at least {threshold:g}"
    )
    if without:
        notes.append(
            f"{without} of {document['responses']} responses have no reward: they count as 0 in means, and never pass, "
            "vote, or are the best"
        )
    if document["repeated_rows"] or document["engines_replaced"]:
        notes.append(
            f"{document['repeated_rows']} responses were generated again from their seeds, and "
            f"{document['engines_replaced']} engines replaced, because engines failed (run.log)"
        )
    if document["truncated_fraction"]:
        notes.append(f"{document['truncated_fraction']:.1%} of the responses end at rollout.max_new_tokens")
    return notes
