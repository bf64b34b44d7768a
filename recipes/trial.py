"""A trial of the roles that score, on demonstrations, before supervised steps keep them waiting for minutes."""

import numpy as np

from recipes.scoring import Scoring
from recipes.session import Session
from rlpack.distributed.errors import RoleError
from workers.reward import RewardWorker

# As many as show that a function fails on all (`rlpack.rewards.scoring`), and few enough for a judge that is paid.
_ROWS = 16
_FAILED = ("reward/errors", "reward/timeouts", "reward/killed", "reward/invalid")


def score_demonstrations(session: Session) -> None:
    """Let every role that scores say what the first demonstrations are worth, as if the policy had written them.

    Nothing else comes of it: the run's figures begin with the first step.

    Raises:
        RoleError: a role or a reward function doesn't work, or returns something else than rewards.
    """
    if not session.scorers:
        return
    rows = np.arange(min(_ROWS, len(session.prompts)))
    with session.run.timer("reward"), session.store.step():
        shown = session.prompts.demonstrations(rows)
        tokens = session.store.take(shown.keep(["input_ids", "prompt_lengths"]))
        written = [
            session.tokenizer.decode(row[start:].tolist(), skip_special_tokens=True)
            for row, start in zip(tokens["input_ids"].rows(), tokens["prompt_lengths"].tolist(), strict=True)
        ]
        texts = session.prompts.batch(rows).drop(["input_ids"])
        scoring = Scoring(session.scorers)
        try:
            scoring.begin(shown.union({**texts, "completion": written, "finish_reason": ["stop"] * rows.size}))
            rewards, valid, _, counts = scoring.finish()
            if not valid.any() and session.config.reward.max_failures < 1:
                _refuse_failures(counts)
        except RoleError as error:
            error.cause = f"on {rows.size} demonstrations, tried before the first step: {error.cause}"
            raise
    kept = rewards[valid]
    found = f"{kept.mean():.3g} on average" if kept.numel() else "nothing"
    left_out = f"; {rows.size - kept.numel()} are quarantined" if kept.numel() < rows.size else ""
    session.run.note(f"rewards tried on {rows.size} demonstrations, which get {found}{left_out}")


def _refuse_failures(counts: dict[str, float]) -> None:
    """Raise if functions failed, on rows of which none has a reward: they don't work."""
    found = ", ".join(f"{name}: {counts[name]:.0f}" for name in _FAILED if counts.get(name))
    if found:
        problem = (
            f"reward functions failed on all of them ({found}); their log shows the first failure. Mend the function, "
            "or set reward.max_failures=1 to train all the same"
        )
        raise RoleError("reward", None, RewardWorker.score.__name__, problem)
