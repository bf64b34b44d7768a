"""DAPO (Yu et al., 2025, arXiv:2503.14476).

for each step:
    until the batch is full of groups whose rewards differ:
        rollouts += rollout.generate(prompts × n)
        reward   += reward.score(rollouts) - overlong penalty
    old, ref   = actor.logprobs(rollouts), reference.logprobs(rollouts)
    rollouts   = without truncated responses, if asked for
    advantages = group_relative(reward)
    actor.update(rollouts)                      # every mini-batch, μ times
    rollout.load(actor.weights)

The clipping bounds and the mean over tokens are settings: see configs/recipe/dapo.yaml.
"""

from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver.dynamic_sampling import filter_overlong, sample_informative_groups
from rlpack.recipes.driver.evaluation import evaluate
from rlpack.recipes.driver.policy_stages import (
    compute_advantages,
    compute_old_logprobs,
    compute_reference_logprobs,
    freeze_reference,
    sync_weights,
    update_actor,
)
from rlpack.recipes.driver.session import Session, open_session


def main(config: Config) -> None:
    """Run the recipe from its start, or from its last checkpoint, to the report."""
    with open_session(config) as session:
        sft.sft_warmup(session)
        train(session)


def train(session: Session) -> None:
    """Take `trainer.steps` rollout steps."""
    freeze_reference(session)
    sync_weights(session)
    for step in session.steps("train", session.config.trainer.steps, evaluate):
        rollouts = sample_informative_groups(session, step)
        rollouts = compute_old_logprobs(session, step, rollouts)
        rollouts = compute_reference_logprobs(session, step, rollouts)
        rollouts = filter_overlong(session, step, rollouts)
        rollouts = compute_advantages(session, step, rollouts)
        update_actor(session, step, rollouts)
        sync_weights(session, step)
