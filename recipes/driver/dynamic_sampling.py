"""DAPO's dynamic sampling and its overlong rules (Yu et al., 2025, arXiv:2503.14476)."""

import numpy as np
import torch

from rlpack.algorithms.shaping import informative_rows, soft_overlong_penalty
from rlpack.batch.batch import BatchedDataDict
from rlpack.recipes.driver.groups_by_end import concat_scored
from rlpack.recipes.driver.reward_stages import PendingRewards, collect_rewards, report_rewards
from rlpack.recipes.driver.rollout_stages import draw_prompts, generate, report_lengths
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext


def sample_informative_groups(
    session: Session, step: StepContext, *, max_rounds: int, overlong_buffer: int = 0, overlong_penalty: float = 0.0
) -> BatchedDataDict:
    """Return scored rollouts of `trainer.prompts_per_step` groups whose rewards differ.

    Prompts are drawn until there are enough such groups. Rewards are compared before the length penalty: the constraint
    of equation 11 is on correctness, and a penalty alone would get advantages of full size. After `max_rounds`, groups
    with equal rewards take the places of missing ones; for the same reason, they get no length penalty. The metrics
    `sampling/*` count the groups of both kinds.

    Args:
        session: the run.
        step: the step in progress.
        max_rounds: maximum number of rounds of drawing prompts.
        overlong_buffer: tokens at the end of `rollout.max_new_tokens` over which the length penalty rises; 0 for none.
        overlong_penalty: the penalty at the end of the buffer.
    """
    num_groups, longest = session.config.trainer.prompts_per_step, session.config.rollout.max_new_tokens
    rounds: list[BatchedDataDict] = []
    informative: list[torch.Tensor] = []
    num_informative = num_drawn = 0
    while num_informative < num_groups and len(rounds) < max_rounds:
        missing = num_groups - num_informative
        rollouts = _score_groups(session, step, missing)
        informative.append(is_informative(rollouts))
        rollouts["group_ids"] = rollouts["group_ids"] + num_drawn
        rounds.append(rollouts)
        num_drawn += missing
        num_informative += rollouts["group_ids"][informative[-1]].unique().numel()
    batch, differs = concat_scored(rounds), torch.cat(informative)
    penalties = soft_overlong_penalty(
        batch["response_lengths"], longest=longest, buffer=overlong_buffer, penalty=overlong_penalty
    )
    batch = batch.drop(["rewards"]).union({"rewards": batch["rewards"] + penalties.where(differs, 0.0)})
    report_rewards(step, batch)
    report_lengths(step, batch)
    step.metrics |= {
        "sampling/rounds": float(len(rounds)),
        "sampling/informative_fraction": num_informative / num_drawn,
        "sampling/discarded_groups": float(num_drawn - num_groups),
        "sampling/filled_groups": float(max(0, num_groups - num_informative)),
    }
    return batch.select(_first_groups(batch["group_ids"].numpy(), differs.numpy(), num_groups))


def is_informative(rollouts: BatchedDataDict) -> torch.Tensor:
    """Return whether the rewards of each row's group differ, bool [B]."""
    return informative_rows(rollouts["rewards"], rollouts["group_ids"], rollouts["valid"])


def filter_overlong(step: StepContext, rollouts: BatchedDataDict, *, enabled: bool) -> BatchedDataDict:
    """Exclude truncated responses from the loss if `enabled`; their rewards still count in baselines."""
    if not enabled:
        return rollouts
    truncated = torch.tensor([reason == "length" for reason in rollouts["finish_reason"]], dtype=torch.bool)
    step.metrics["sampling/overlong_filtered"] = float(truncated.sum())
    return rollouts.union({"trains": ~truncated})


def _score_groups(session: Session, step: StepContext, count: int) -> BatchedDataDict:
    """Return the rollouts of `count` new prompts with their rewards."""
    pending = PendingRewards(session.scorers)
    with pending.collecting(session.config.rollout.engine):
        rollouts = generate(session, step, draw_prompts(session, step, count), pending.submit)
    return collect_rewards(session, step, rollouts, pending)


def _first_groups(group_ids: np.ndarray, informative: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of the first `count` groups, informative ones first.

    Rows are in the order of the batch.

    >>> _first_groups(np.array([0, 0, 1, 1, 2, 2]), np.array([False, False, True, True, True, True]), 2).tolist()
    [2, 3, 4, 5]
    """
    ids, first = np.unique(group_ids, return_index=True)
    order = np.lexsort((first, ~informative[first]))
    return np.flatnonzero(np.isin(group_ids, ids[order[:count]]))
