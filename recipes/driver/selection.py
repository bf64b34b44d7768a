"""The stages of a step that choose what is trained on, or what it is compared with."""

from collections.abc import Callable

import numpy as np
import torch

from rlpack.algorithms.shaping import informative, soft_overlong
from rlpack.batch.batch import BatchedDataDict
from rlpack.recipes.driver import stages
from rlpack.recipes.driver.reward_stages import Scoring, count_failures, finish_scoring, report_rewards
from rlpack.recipes.driver.session import Session


def informative_rollouts(session: Session, step: int) -> BatchedDataDict:
    """Return scored rollouts of `trainer.prompts_per_step` groups whose rewards differ (DAPO's dynamic sampling).

    Prompts are drawn until there are as many, in `dapo.max_rounds` rounds at most. What is missing then is filled up
    with groups that are alike in themselves, and so add nothing to the loss. Each is counted.
    """
    settings, wanted = session.config, session.config.trainer.prompts_per_step
    rounds: list[BatchedDataDict] = []
    found = drawn = 0
    while found < wanted and len(rounds) < settings.dapo.max_rounds:
        draw = stages.draw_prompts(session, step, wanted - found)
        scoring = Scoring(session.scorers)
        rollouts = stages.generate(session, draw, scoring.begin)
        rollouts = _shaped(session, finish_scoring(session, rollouts, scoring))
        rollouts["group_ids"] = rollouts["group_ids"] + drawn
        rounds.append(rollouts)
        drawn += wanted - found
        found += _groups(rollouts, is_informative(rollouts))
    batch = BatchedDataDict.concat(rounds)
    useful = is_informative(batch)
    report_rewards(session, batch)
    stages.report_lengths(session, batch)
    session.metrics |= {
        "sampling/rounds": float(len(rounds)),
        "sampling/informative_fraction": found / drawn,
        "sampling/discarded_groups": float(drawn - wanted),
        "sampling/filled_groups": float(max(0, wanted - found)),
    }
    return batch.select(_first_groups(batch["group_ids"].numpy(), useful.numpy(), wanted))


def is_informative(rollouts: BatchedDataDict) -> torch.Tensor:
    """Return whether each row's group has rewards that differ, bool [B]."""
    return informative(rollouts["rewards"], rollouts["group_ids"], rollouts["valid"])


def without_cut_off(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Let no token of a response that was cut off count, if `dapo.overlong_filter` says so; its reward still does."""
    if not session.config.dapo.overlong_filter:
        return rollouts
    cut_off = torch.tensor([reason == "length" for reason in rollouts["finish_reason"]], dtype=torch.bool)
    session.metrics["sampling/overlong_filtered"] = float(cut_off.sum())
    return rollouts.union({"trains": ~cut_off})


def respond_greedily(session: Session, draw: stages.Draw, then: Callable[[BatchedDataDict], None]) -> None:
    """Generate the likeliest response to each prompt, in parts that `then` gets."""
    with session.run.timer("greedy"):
        stages.respond(session, draw, 1, temperature=0.0, then=then)


def greedy_rewards(session: Session, rollouts: BatchedDataDict, greedy: Scoring) -> BatchedDataDict:
    """Add `greedy_rewards` f32 [B]: what the prompt's likeliest response earns; without one its rows are not valid."""
    with session.run.timer("reward"):
        rewards, valid, _, counts = greedy.finish()
    count_failures(session, counts)
    session.metrics["reward/greedy_mean"] = rewards[valid].mean().item() if valid.any() else 0.0
    samples = session.config.trainer.group_size
    both = rollouts["valid"] & valid.repeat_interleave(samples)
    return rollouts.drop(["valid"]).union({"valid": both, "greedy_rewards": rewards.repeat_interleave(samples)})


def _shaped(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Take the punishment of length off the rewards."""
    settings, longest = session.config.dapo, session.config.rollout.max_new_tokens
    counts = rollouts["input_ids"].lengths - rollouts["prompt_lengths"]
    added = soft_overlong(counts, longest=longest, buffer=settings.overlong_buffer, penalty=settings.overlong_penalty)
    return rollouts.drop(["rewards"]).union({"rewards": rollouts["rewards"] + added})


def _groups(rollouts: BatchedDataDict, rows: torch.Tensor) -> int:
    return rollouts["group_ids"][rows].unique().numel()


def _first_groups(group_ids: np.ndarray, useful: np.ndarray, wanted: int) -> np.ndarray:
    """Return the rows of the first `wanted` groups, useful ones before others, in the order they came in.

    >>> _first_groups(np.array([0, 0, 1, 1, 2, 2]), np.array([False, False, True, True, True, True]), 2).tolist()
    [2, 3, 4, 5]
    """
    ids, first = np.unique(group_ids, return_index=True)
    order = np.lexsort((first, ~useful[first]))
    return np.flatnonzero(np.isin(group_ids, ids[order[:wanted]]))
