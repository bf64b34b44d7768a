"""GRPO (Shao et al., 2024, arXiv:2402.03300).

for each step:
    prompts    = draw()
    with engines_awake():                       # on GPUs that roles share, engines sleep afterwards
        rollouts = rollout.generate(prompts × n)
    reward     = reward.score(rollouts)         # in the background, from the first generated part on
    ref        = reference.logprobs(rollouts)   # submitted here, collected below
    plan       = actor.plan(rollouts)           # mini-batches and microbatches of the calls that follow
    old        = actor.logprobs(rollouts)       # skipped for a single update, since then old = new
    advantages = group_relative(reward)
    actor.update(rollouts)                      # every mini-batch, μ times
    rollout.load(actor.weights)

Before the first step, `sft_warmup.steps` supervised steps (recipes/sft.py) teach a new model the answers' format.
"""

from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver.engine_lifecycle import engines_awake
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.evaluation import evaluate
from rlpack.recipes.driver.policy_stages import (
    collect_reference_logprobs,
    compute_advantages,
    compute_old_logprobs,
    initialize_reference,
    submit_reference_logprobs,
    update_actor,
)
from rlpack.recipes.driver.reward_stages import PendingRewards, collect_rewards
from rlpack.recipes.driver.rollout_stages import draw_prompts, generate
from rlpack.recipes.driver.session import Session, open_session


def main(config: Config) -> None:
    """Run the recipe from its start, or from its last checkpoint, to the report."""
    with open_session(config) as session:
        sft.sft_warmup(session)
        train(session)


def train(session: Session) -> None:
    """Take `trainer.steps` rollout steps."""
    initialize_reference(session)
    sync_weights(session)
    for step in session.steps("train", session.config.trainer.steps, evaluate):
        prompts = draw_prompts(session, step)
        rewards = PendingRewards(session.scorers)
        with engines_awake(session, step):
            rollouts = generate(session, step, prompts, rewards.submit)
        reference = submit_reference_logprobs(session, rollouts)
        plan = session.actor.plan(rollouts, mini_batches=True)
        rollouts = compute_old_logprobs(session, step, rollouts, plan)
        rollouts = collect_reference_logprobs(session, step, rollouts, plan, reference)
        rollouts = collect_rewards(session, step, rollouts, rewards)
        rollouts = compute_advantages(session, step, rollouts, plan)
        update_actor(session, step, rollouts, plan)
        sync_weights(session, step)
