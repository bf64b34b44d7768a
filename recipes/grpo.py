"""GRPO (Shao et al., 2024, arXiv:2402.03300).

for each step:
    rollouts   = rollout.generate(prompts × n)
    reward     = reward.score(rollouts)         # beside the line before and the next one
    old, ref   = actor.logprobs(rollouts), reference.logprobs(rollouts)
    advantages = group_relative(reward)
    actor.update(rollouts)            # every mini-batch, μ times
    rollout.load(actor.weights)

Before the first step, `sft_warmup.steps` supervised steps (recipes/sft.py) teach a new model what answers look like.
"""

from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver import stages
from rlpack.recipes.driver.evaluation import evaluate
from rlpack.recipes.driver.reward_stages import Scoring, finish_scoring
from rlpack.recipes.driver.session import Session, open_session


def main(config: Config) -> None:
    """Run the recipe from start, or from where its run directory stopped, to its report."""
    with open_session(config) as session:
        sft.sft_warmup(session)
        train(session)


def train(session: Session) -> None:
    """Take `trainer.steps` rollout steps."""
    stages.freeze_reference(session)
    stages.load_rollout_weights(session)
    for step in session.steps("train", session.config.trainer.steps, evaluate):
        prompts = stages.draw_prompts(session, step)
        scoring = Scoring(session.scorers)
        rollouts = stages.generate(session, prompts, scoring.begin)
        rollouts = stages.old_logprobs(session, rollouts)
        rollouts = stages.reference_logprobs(session, rollouts)
        rollouts = finish_scoring(session, rollouts, scoring)
        rollouts = stages.advantages(session, rollouts)
        stages.update(session, rollouts)
        stages.load_rollout_weights(session)
