"""DAPO (Yu et al., 2025, arXiv:2503.14476).

for each step:
    with engines_awake():                       # on GPUs that roles share, engines sleep afterwards
        until the batch is full of groups whose rewards differ:
            rollouts += rollout.generate(prompts × n)
            reward   += reward.score(rollouts) - overlong penalty  # if the rewards of the group differ
    trains     = responses that were not truncated  # if configured; the others still count in baselines
    ref        = reference.logprobs(rollouts)   # submitted here, collected below
    plan       = actor.plan(rollouts)           # mini-batches and microbatches of the calls that follow
    old        = actor.logprobs(rollouts)       # skipped for a single update, since then old = new
    advantages = group_relative(reward)
    actor.update(rollouts)                      # every mini-batch, μ times
    rollout.load(actor.weights)

The clipping bounds and the mean over tokens are settings: see configs/recipe/dapo.yaml.

With `trainer.lead=1`, the next step's batch is drawn, generated and scored while this one is trained on
(recipes/driver/ahead.py).
"""

from rlpack.config.recipes import recipe_section
from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.dapo_spec import Dapo
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.dynamic_sampling import filter_overlong, sample_informative_groups
from rlpack.recipes.driver.engine_lifecycle import engines_awake
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
from rlpack.recipes.driver.step_context import StepContext


def main(config: Config) -> None:
    """Run the recipe from its start, or from its last checkpoint, to the report."""
    with open_session(config) as session:
        sft.sft_warmup(session)
        train(session)


def draw(session: Session, step: StepContext) -> Batch:
    """Generate and score responses until the batch of one step is full of groups whose rewards differ."""
    settings = recipe_section(session.config, Dapo)
    with engines_awake(session, step):
        rollouts = sample_informative_groups(
            session,
            step,
            max_rounds=settings.max_rounds,
            overlong_buffer=settings.overlong_buffer,
            overlong_penalty=settings.overlong_penalty,
        )
    return Batch(filter_overlong(step, rollouts, enabled=settings.overlong_filter), as_scored)


def train(session: Session) -> None:
    """Take `trainer.steps` rollout steps."""
    initialize_reference(session)
    batches = AheadQueue(session, draw, rounds=recipe_section(session.config, Dapo).max_rounds)
    sync_weights(session)
    for step in session.steps("train", session.config.trainer.steps, evaluate):
        rollouts, _ = batches.take(step)
        reference = submit_reference_logprobs(session, rollouts)
        plan = session.actor.plan(rollouts, mini_batches=True)
        rollouts = compute_old_logprobs(session, step, rollouts, plan)
        rollouts = correct_off_policy(session, step, rollouts, plan)
        rollouts = collect_reference_logprobs(session, step, rollouts, plan, reference)
        rollouts = compute_advantages(session, step, rollouts, plan)
        update_actor(session, step, rollouts, plan)
        batches.publish(step)
