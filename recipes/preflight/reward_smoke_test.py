"""A trial of the roles that score, on demonstrations, before supervised steps keep them waiting for minutes."""

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.reward_rules import JUDGE
from rlpack.config.schema import Config
from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver.reward_stages import Judgement, Scoring
from rlpack.recipes.driver.session import Session
from rlpack.workers.reward import RewardWorker

# Enough to tell a function that doesn't work, and few enough for a judge that is paid.
_ROWS = 16
_FAILED = ("reward/errors", "reward/timeouts", "reward/killed", "reward/invalid")


def score_demonstrations(session: Session) -> None:
    """Let every role that scores say what the first demonstrations are worth, as if the policy had written them.

    Those that are longer than a response may be are left out, and counted. Failures count towards those that a run may
    have; no figure of the run comes of it.

    Raises:
        RoleError: a role or a reward function doesn't work, or returns something else than rewards.
    """
    with session.store.step():
        written = _as_rollouts(session)
        started = [(group.role, Scoring([group])) for group in session.scorers if written.num_rows]
        try:
            for _, scoring in started:
                scoring.begin(written)
            found = {role: scoring.finish() for role, scoring in started}
            for role, judgement in found.items():
                _refuse_failures(session.config, role, judgement)
        except RoleError as error:
            error.cause = f"on {written.num_rows} demonstrations, tried before the first step: {error.cause}"
            raise
    for role, judgement in found.items():
        kept = judgement.rewards[judgement.valid]
        mean = f"{kept.mean():.3g} on average" if kept.numel() else "nothing"
        left_out = f", {int((~judgement.valid).sum())} of them no reward" if not judgement.valid.all() else ""
        session.run.note(f"role {role} gives {written.num_rows} demonstrations {mean}{left_out}")


def _as_rollouts(session: Session) -> BatchedDataDict:
    """Return the first demonstrations with the columns that responses have when they are scored."""
    rows = np.arange(min(_ROWS, len(session.prompts)))
    shown = session.prompts.demonstrations(rows)
    tokens = session.store.fetch(shown.keep(["input_ids", "prompt_lengths"]))
    targets = [
        row[start:].tolist()
        for row, start in zip(tokens["input_ids"].rows(), tokens["prompt_lengths"].tolist(), strict=True)
    ]
    texts = session.prompts.batch(rows).drop(["input_ids"])
    completions = [session.tokenizer.decode(target, skip_special_tokens=True) for target in targets]
    written = shown.union({**texts, "completion": completions, "finish_reason": ["stop"] * rows.size})
    longest = session.config.rollout.max_new_tokens
    kept = [row for row, target in enumerate(targets) if len(target) <= longest]
    if len(kept) < rows.size:
        over = f"{rows.size - len(kept)} of the first {rows.size} demonstrations"
        session.run.note(f"{over} are over rollout.max_new_tokens={longest}, and no scoring role is tried on them")
    return written.select(kept)


def _refuse_failures(config: Config, role: str, judgement: Judgement) -> None:
    """Raise if a role counted a failure on every row: what it calls doesn't work."""
    own = config.judge if config.roles[role].target == JUDGE else config.reward
    failed = {name: count for name in _FAILED if (count := judgement.counts.get(name, 0.0))}
    if sum(failed.values()) < judgement.valid.numel() or own.max_failures >= 1:
        return
    key = f"{'judge' if own is config.judge else 'reward'}.max_failures"
    counts = ", ".join(f"{name}: {count:.0f}" for name, count in failed.items())
    problem = f"it failed on all of them ({counts}); mend it, or set {key}=1 to train all the same"
    raise RoleError(role, None, RewardWorker.score.__name__, problem)
