"""Reward smoke test: score a few demonstrations before the supervised steps, which would delay an error by minutes."""

import logging

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.reward_rules import CALLS_SERVER
from rlpack.config.schema import Config
from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver.reward_stages import PendingRewards, RowRewards
from rlpack.recipes.driver.session import Session
from rlpack.workers.reward import RewardWorker

logger = logging.getLogger(__name__)

# Enough rows to detect a broken function, few enough for a paid judge.
_ROWS = 16
_FAILURES = ("reward/errors", "reward/timeouts", "reward/killed", "reward/invalid")


def score_demonstrations(session: Session) -> None:
    """Let every scoring role score the first demonstrations, as if the policy had written them.

    Demonstrations longer than `rollout.max_new_tokens` are left out, and a note says how many. Failures count toward
    the run's limit; no metric is recorded.

    Raises:
        RoleError: a role or a reward function doesn't work, or returns something other than rewards.
    """
    with session.store.lease("the reward smoke test"):
        rollouts = _as_rollouts(session)
        pending = {group.role: PendingRewards([group]) for group in session.scorers if rollouts.num_rows}
        try:
            for rewards in pending.values():
                rewards.submit(rollouts)
            results = {role: rewards.result() for role, rewards in pending.items()}
            for role, result in results.items():
                _refuse_failures(session.config, role, result)
        except RoleError as error:
            error.cause = f"on {rollouts.num_rows} demonstrations, tried before the first step: {error.cause}"
            raise
    for role, result in results.items():
        valid_rewards = result.rewards[result.valid]
        if not valid_rewards.numel():
            summary = "no rewards"
            logger.warning(
                "role %s gave none of %d demonstrations a reward; does the function return a number? Responses without "
                "a reward are not trained on",
                *(role, rollouts.num_rows),
            )
        else:
            num_without = int((~result.valid).sum())
            summary = f"mean reward {valid_rewards.mean():.3g}"
            summary += f", {num_without} without a reward" if num_without else ""
        session.run.note(f"role {role} scored {rollouts.num_rows} demonstrations: {summary}")


def _as_rollouts(session: Session) -> BatchedDataDict:
    """Return the first demonstrations with the columns that responses have when they are scored."""
    rows = np.arange(min(_ROWS, len(session.prompts)))
    demonstrations = session.prompts.demonstrations(rows)
    tokens = session.store.fetch(demonstrations.keep(["input_ids", "response_mask"]))
    rows_and_masks = zip(tokens["input_ids"].rows(), tokens["response_mask"].rows(), strict=True)
    targets = [row[mask].tolist() for row, mask in rows_and_masks]
    texts = session.prompts.batch(rows).drop(["input_ids"])
    completions = [session.tokenizer.decode(target, skip_special_tokens=True) for target in targets]
    columns = {**texts, "completion": completions, "finish_reason": ["stop"] * rows.size}
    longest = session.config.rollout.max_new_tokens
    short = [row for row, target in enumerate(targets) if len(target) <= longest]
    if len(short) < rows.size:
        over = f"{rows.size - len(short)} of the first {rows.size} demonstrations"
        session.run.note(f"{over} exceed rollout.max_new_tokens={longest}; no scoring role is tested on them")
    return demonstrations.union(columns).select(short)


def _refuse_failures(config: Config, role: str, result: RowRewards) -> None:
    """Raise if a role failed on every row, which means that something it calls is broken."""
    section = config.judge if config.roles[role].target in CALLS_SERVER else config.reward
    failed = {name: count for name in _FAILURES if (count := result.counts.get(name, 0.0))}
    if sum(failed.values()) < result.valid.numel() or section.max_failures >= 1:
        return
    key = f"{'judge' if section is config.judge else 'reward'}.max_failures"
    counts = ", ".join(f"{name}: {count:.0f}" for name, count in failed.items())
    problem = f"it failed on all of them ({counts}); fix it, or set {key}=1 to train anyway"
    raise RoleError(role, None, RewardWorker.score.__name__, problem)
