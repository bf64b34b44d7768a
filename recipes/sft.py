"""Supervised fine-tuning on demonstrations.

for each step:
    batch = draw_demonstrations()
    actor.train_step(batch, SFTLoss())           # one optimizer step

The loss on the held-out demonstrations is measured every `evaluation.every` steps.
"""

import math

from rlpack.config.schema import Config, SFTWarmup
from rlpack.recipes.driver.evaluation import evaluate_loss
from rlpack.recipes.driver.learning_rate import learning_rate
from rlpack.recipes.driver.open_session import open_session
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.sft_stages import draw_demonstrations, reset_optimizer, sft_step
from rlpack.recipes.preflight.reward_smoke_test import score_demonstrations


def main(config: Config) -> None:
    """Run the recipe from its start, or from its last checkpoint, to the report."""
    with open_session(config) as session:
        train(session)


def train(session: Session) -> None:
    """Take `trainer.steps` steps of `trainer.prompts_per_step` demonstrations."""
    trainer, optimizer = session.config.trainer, session.config.actor.optimizer
    for step in session.steps("train", trainer.steps, evaluate_loss):
        batch = draw_demonstrations(session, step, trainer.prompts_per_step)
        sft_step(session, step, batch, learning_rate(optimizer, step.number, trainer.steps))


def sft_warmup(session: Session) -> None:
    """Take `sft_warmup.steps` supervised steps before another recipe begins with a new optimizer.

    The scoring roles are tested before the first step.
    """
    settings = session.config.sft_warmup
    if settings.steps > 0 and session.progress == Progress():
        score_demonstrations(session)
    for step in session.steps("sft_warmup", settings.steps):
        batch = draw_demonstrations(session, step, settings.batch_size)
        sft_step(session, step, batch, sft_warmup_rate(settings, step.number))
        if step.number == settings.steps:
            reset_optimizer(session)


def sft_warmup_rate(settings: SFTWarmup, step: int) -> float:
    """Return the learning rate of a step, counted from 1.

    The rate rises linearly over the first tenth of the steps, then falls along half a cosine, which would reach 0 one
    step after the last.

    >>> settings = SFTWarmup(steps=21, learning_rate=1.0)
    >>> [round(sft_warmup_rate(settings, step), 2) for step in (1, 2, 12, 21)]
    [0.5, 1.0, 0.5, 0.01]
    """
    ramp = max(1, settings.steps // 10)
    if step <= ramp:
        return settings.learning_rate * step / ramp
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - ramp) / (settings.steps - ramp + 1)))
