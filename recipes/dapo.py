"""DAPO (Yu et al., 2025, arXiv:2503.14476).

for each step:
    until the batch is full of groups whose rewards differ:
        rollouts += rollout.generate(prompts × n)
        reward   += reward.score(rollouts) - punishment of length
    old, ref   = actor.logprobs(rollouts), reference.logprobs(rollouts)
    advantages = group_relative(reward)
    actor.update(rollouts)            # every mini-batch, μ times; responses that were cut off left out if asked
    rollout.load(actor.weights)

The bounds of the ratio and the mean over tokens are settings: see configs/recipe/dapo.yaml.
"""

from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver import stages
from rlpack.recipes.driver.evaluation import evaluate
from rlpack.recipes.driver.selection import informative_rollouts, without_cut_off
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
        rollouts = informative_rollouts(session, step)
        rollouts = stages.old_logprobs(session, rollouts)
        rollouts = stages.reference_logprobs(session, rollouts)
        rollouts = without_cut_off(session, rollouts)
        rollouts = stages.advantages(session, rollouts)
        stages.update(session, rollouts)
        stages.load_rollout_weights(session)
