"""Supervised fine-tuning on demonstrations.

for each step:
    batch = demonstrations(prompts)
    actor.train_step(batch, SFTLoss())     # one optimizer step

The held-out demonstrations are scored now and then.
"""

import math

from rlpack.config.schema import Config, SFTWarmup
from rlpack.recipes.driver import stages
from rlpack.recipes.driver.evaluation import evaluate_loss
from rlpack.recipes.driver.session import Progress, Session, open_session
from rlpack.recipes.preflight.reward_smoke_test import score_demonstrations


def main(config: Config) -> None:
    """Take `trainer.steps` steps of `trainer.prompts_per_step` sequences."""
    with open_session(config) as session:
        for _ in session.steps("train", config.trainer.steps, evaluate_loss):
            batch = stages.demonstrations(session, config.trainer.prompts_per_step)
            stages.sft_step(session, batch, session.learning_rate)


def sft_warmup(session: Session) -> None:
    """Take `sft_warmup.steps` steps before another recipe begins; its optimizer starts anew.

    Roles that score are tried before the first one.
    """
    settings = session.config.sft_warmup
    if settings.steps > 0 and session.progress == Progress():
        score_demonstrations(session)
    for step in session.steps("sft_warmup", settings.steps):
        batch = stages.demonstrations(session, settings.batch_size)
        stages.sft_step(session, batch, sft_warmup_rate(settings, step))
        if step == settings.steps:
            stages.reset_optimizer(session)


def sft_warmup_rate(settings: SFTWarmup, step: int) -> float:
    """Return the learning rate of step 1, 2, …: linear over the first tenth, then half a cosine.

    The step after the last would have 0.

    >>> settings = SFTWarmup(steps=21, learning_rate=1.0)
    >>> [round(sft_warmup_rate(settings, step), 2) for step in (1, 2, 12, 21)]
    [0.5, 1.0, 0.5, 0.01]
    """
    ramp = max(1, settings.steps // 10)
    if step <= ramp:
        return settings.learning_rate * step / ramp
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - ramp) / (settings.steps - ramp + 1)))
