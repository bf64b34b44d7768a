"""A recipe that records what it trains on, and what its record says of a run that was killed.

    rlpack train recipe.target=benchmarks.ledger …

The recipe is GRPO without a KL term. After the update of a step it appends a line to `ledger.jsonl` in the run
directory: the step, and of each row the prompt's uid, the response's length, and the range of its policy versions. A
run that was killed and resumed takes the steps after its checkpoint again; these lines replace the earlier ones.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.recipes import RecipeSpec
from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import draw_rollouts
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.evaluation import evaluate
from rlpack.recipes.driver.open_session import open_session
from rlpack.recipes.driver.policy_stages import compute_advantages, compute_old_logprobs, update_actor
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext

SPEC = RecipeSpec(runs_ahead=True, draws_once=True, takes_late_groups=True)
NAME = "ledger.jsonl"


def main(config: Config) -> None:
    """Run the recipe from its start, or from its last checkpoint."""
    with open_session(config) as session:
        sft.sft_warmup(session)
        batches = AheadQueue(session, draw_rollouts)
        sync_weights(session)
        for step in session.steps("train", config.trainer.steps, evaluate):
            rollouts, score = batches.take(step)
            plan = session.actor.plan(rollouts, mini_batches=True)
            rollouts = compute_old_logprobs(session, step, rollouts, plan)
            rollouts = score(step, rollouts)
            rollouts = compute_advantages(session, step, rollouts, plan)
            update_actor(session, step, rollouts, plan)
            record(session, step, rollouts)
            batches.publish(step)


def record(session: Session, step: StepContext, rollouts: BatchedDataDict) -> None:
    """Append a line about the rows that a step trained on."""
    rows = session.store.fetch(rollouts.keep(["uid", "response_lengths", "policy_version"]))
    versions = [row[row >= 0] for row in rows["policy_version"].rows()]
    entry = {
        "step": step.number,
        "version": session.rollout_weights.version,
        "uids": list(rows["uid"]),
        "lengths": rows["response_lengths"].tolist(),
        "oldest": [int(row.min()) if row.numel() else None for row in versions],
        "newest": [int(row.max()) if row.numel() else None for row in versions],
    }
    with (session.run.run_dir / NAME).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


@dataclass(frozen=True)
class Lineage:
    """What the weights of a run were trained on.

    Attributes:
        entries: one line of the ledger for each step, in order.
        repeated: how many steps were taken again after a kill.
    """

    entries: list[dict[str, Any]]
    repeated: int

    @property
    def uids(self) -> list[list[str]]:
        """Return the uids of each step's rows."""
        return [entry["uids"] for entry in self.entries]

    @property
    def lengths(self) -> np.ndarray:
        """Return the lengths of all responses, int64."""
        return np.array([length for entry in self.entries for length in entry["lengths"]], dtype=np.int64)

    @property
    def lags(self) -> list[int]:
        """Return how many versions the oldest token of each row was behind the newest."""
        return [entry["version"] - oldest for entry in self.entries for oldest in entry["oldest"] if oldest is not None]

    @property
    def mixed(self) -> float:
        """Return the share of responses that have tokens of several versions."""
        pairs = [pair for entry in self.entries for pair in zip(entry["oldest"], entry["newest"], strict=True)]
        return sum(oldest != newest for oldest, newest in pairs) / max(1, len(pairs))


def lineage(run_dir: Path) -> Lineage:
    """Return what the weights of a run were trained on: a resumed run goes back to its checkpoint.

    Raises:
        ValueError: a step is missing, so a run continued from a checkpoint that the ledger doesn't lead to.
    """
    path = run_dir / NAME
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    entries: list[dict[str, Any]] = []
    repeated = 0
    for line in lines:
        if not line.endswith("\n"):  # the run was killed while it wrote it
            continue
        entry = json.loads(line)
        repeated += len(entries) - entry["step"] + 1
        if entry["step"] > len(entries) + 1:
            raise ValueError(f"{path} has step {entry['step']} after step {len(entries)}")
        entries = [*entries[: entry["step"] - 1], entry]
    return Lineage(entries, repeated)


def problems_of(killed: Lineage, uids: list[str], prompts_per_step: int, group_size: int, lead: int) -> list[str]:
    """Return what is wrong with a lineage: prompts that are missing, repeated or out of order, and stale tokens.

    Args:
        killed: of the run.
        uids: of the prompts in the order of the run's stream, at least as many as the run has taken.
        prompts_per_step: of the run.
        group_size: of the run.
        lead: the largest lag that is allowed.
    """
    problems = []
    for number, found in enumerate(killed.uids, start=1):
        drawn = uids[prompts_per_step * (number - 1) : prompts_per_step * number]
        expected = [uid for uid in drawn for _ in range(group_size)]
        if found != expected:
            problems.append(f"step {number} trained on {found}; it has to be {expected}")
    taken = [uid for rows in killed.uids for uid in rows[::group_size]]
    if len(set(taken)) != len(taken):
        problems.append(f"{len(taken) - len(set(taken))} prompts were trained on again")
    if killed.lags and not 0 <= min(killed.lags) <= max(killed.lags) <= lead:
        problems.append(f"lags are {min(killed.lags)} to {max(killed.lags)}; they have to be 0 to {lead}")
    return problems


def kolmogorov_smirnov(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the largest distance of two empirical distribution functions, and its asymptotic p-value.

    The p-value is Kolmogorov's series with Stephens' correction for finite samples (Stephens 1970). With ties, as
    lengths have them, it is an upper bound.

    >>> distance, p = kolmogorov_smirnov(np.arange(100), np.arange(100) + 50)
    >>> round(distance, 2), p < 1e-6
    (0.5, True)
    """
    values = np.union1d(one, other)
    below = [np.searchsorted(np.sort(sample), values, side="right") / sample.size for sample in (one, other)]
    distance = float(np.abs(below[0] - below[1]).max())
    root = math.sqrt(one.size * other.size / (one.size + other.size))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.3:  # where the series converges slowly, and the probability is 1 to five digits
        return distance, 1.0
    series = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, series))
