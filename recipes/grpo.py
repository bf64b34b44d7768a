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

With `trainer.lead=1`, the next step's batch is drawn, generated and scored while this one is trained on
(recipes/driver/ahead.py).
"""

from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Draw, DrawGroups, draw_groups, draw_rollouts
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.evaluation import evaluate
from rlpack.recipes.driver.off_policy import correct_off_policy
from rlpack.recipes.driver.open_session import open_session
from rlpack.recipes.driver.policy_stages import (
    collect_reference_logprobs,
    compute_advantages,
    compute_old_logprobs,
    initialize_reference,
    submit_reference_logprobs,
    update_actor,
)
from rlpack.recipes.driver.session import Session


def main(config: Config) -> None:
    """Run the recipe from its start, or from its last checkpoint, to the report."""
    with open_session(config) as session:
        sft.sft_warmup(session)
        train(session)


def train(session: Session, draw: Draw = draw_rollouts, draw_groups: DrawGroups = draw_groups) -> None:
    """Take `trainer.steps` rollout steps, on the batches that `draw` returns, or `draw_groups` with late groups."""
    initialize_reference(session)
    batches = AheadQueue(session, draw, draw_groups)
    sync_weights(session)
    for step in session.steps("train", session.config.trainer.steps, evaluate):
        rollouts, score = batches.take(step)
        reference = submit_reference_logprobs(session, rollouts)
        plan = session.actor.plan(rollouts, mini_batches=True)
        rollouts = compute_old_logprobs(session, step, rollouts, plan)
        rollouts = correct_off_policy(session, step, rollouts, plan)
        rollouts = collect_reference_logprobs(session, step, rollouts, plan, reference)
        rollouts = score(step, rollouts)
        rollouts = compute_advantages(session, step, rollouts, plan)
        update_actor(session, step, rollouts, plan)
        batches.publish(step)
