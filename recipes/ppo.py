"""PPO with a critic (Schulman et al., 2017, arXiv:1707.06347).

for each step:
    prompts    = draw()
    with engines_awake():                       # on GPUs that roles share, engines sleep afterwards
        rollouts = rollout.generate(prompts × n)
    reward     = reward.score(rollouts)         # in the background, from the first generated part on
    ref        = reference.logprobs(rollouts)   # submitted here, collected below
    plan       = actor.plan(rollouts)           # mini-batches and microbatches of the calls that follow
    old        = actor.logprobs(rollouts)       # skipped for a single update, since then old = new
    values     = critic.values(rollouts)        # with a separate plan, which critic.update shares
    advantages = gae(reward - β·KL, values)
    critic.update(rollouts)                     # every mini-batch, μ times
    actor.update(rollouts)                      # likewise, after the critic's warm-up, with normalized advantages
    rollout.load(actor.weights)

Before the first step, `sft_warmup.steps` supervised steps (recipes/sft.py) teach a new model the answers' format.
The critic is initialized from the policy that they produce.

With `trainer.lead=1`, the next step's batch is drawn, generated and scored while this one is trained on
(recipes/driver/ahead.py).
"""

from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.critic_stages import (
    compute_token_advantages,
    compute_values,
    initialize_critic,
    update_actor_after_warmup,
    update_critic,
)
from rlpack.recipes.driver.draws import draw_rollouts
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.evaluation import evaluate
from rlpack.recipes.driver.off_policy import correct_off_policy
from rlpack.recipes.driver.open_session import open_session
from rlpack.recipes.driver.policy_stages import (
    add_loss_weights,
    collect_reference_logprobs,
    compute_old_logprobs,
    initialize_reference,
    submit_reference_logprobs,
)
from rlpack.recipes.driver.session import Session


def main(config: Config) -> None:
    """Run the recipe from its start, or from its last checkpoint, to the report."""
    with open_session(config) as session:
        sft.sft_warmup(session)
        train(session)


def train(session: Session) -> None:
    """Take `trainer.steps` rollout steps."""
    initialize_reference(session)
    initialize_critic(session)
    batches = AheadQueue(session, draw_rollouts)
    sync_weights(session)
    for step in session.steps("train", session.config.trainer.steps, evaluate):
        rollouts, score = batches.take(step)
        reference = submit_reference_logprobs(session, rollouts)
        plan = session.actor.plan(rollouts, mini_batches=True)
        rollouts = compute_old_logprobs(session, step, rollouts, plan)
        rollouts = correct_off_policy(session, step, rollouts, plan)
        rollouts = collect_reference_logprobs(session, step, rollouts, plan, reference)
        rollouts = score(step, rollouts)
        critic_plan = session.critic.plan(rollouts, mini_batches=True)
        rollouts = compute_values(session, step, rollouts, critic_plan)
        rollouts, moments = compute_token_advantages(session, step, rollouts, critic_plan)
        rollouts = add_loss_weights(session, step, rollouts, plan)
        update_critic(session, step, rollouts, critic_plan)
        update_actor_after_warmup(session, step, rollouts, plan, moments)
        batches.publish(step)
