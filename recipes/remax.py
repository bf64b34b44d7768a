"""ReMax (Li et al., 2023, arXiv:2310.10505).

for each step:
    rollouts   = rollout.generate(prompts × n)
    greedy     = rollout.generate(prompts, the likeliest tokens)
    reward     = reward.score(rollouts), reward.score(greedy)    # beside the lines before and the next one
    old, ref   = actor.logprobs(rollouts), reference.logprobs(rollouts)
    advantages = reward - the greedy response's reward
    actor.update(rollouts)            # every mini-batch, μ times
    rollout.load(actor.weights)
"""

from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver import stages
from rlpack.recipes.driver.evaluation import evaluate
from rlpack.recipes.driver.reward_stages import Scoring, finish_scoring
from rlpack.recipes.driver.selection import greedy_rewards, respond_greedily
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
        scoring, greedy = Scoring(session.scorers), Scoring(session.scorers)
        rollouts = stages.generate(session, prompts, scoring.begin)
        respond_greedily(session, prompts, greedy.begin)
        rollouts = stages.old_logprobs(session, rollouts)
        rollouts = stages.reference_logprobs(session, rollouts)
        rollouts = finish_scoring(session, rollouts, scoring)
        rollouts = greedy_rewards(session, rollouts, greedy)
        rollouts = stages.advantages(session, rollouts)
        stages.update(session, rollouts)
        stages.load_rollout_weights(session)
