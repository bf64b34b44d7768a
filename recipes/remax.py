"""ReMax (Li et al., 2023, arXiv:2310.10505).

for each step:
    prompts    = draw()
    with engines_awake():                       # on GPUs that roles share, engines sleep afterwards
        rollouts = rollout.generate(prompts × n)
        greedy   = rollout.generate(prompts, temperature 0)
    reward     = reward.score(rollouts), reward.score(greedy)    # in the background, from the first part on
    ref        = reference.logprobs(rollouts)   # submitted here, collected below
    plan       = actor.plan(rollouts)           # mini-batches and microbatches of the calls that follow
    old        = actor.logprobs(rollouts)       # skipped for a single update, since then old = new
    advantages = reward - the greedy response's reward
    actor.update(rollouts)                      # every mini-batch, μ times
    rollout.load(actor.weights)

With `trainer.lead=1`, the next step's batch is drawn, generated and scored while this one is trained on
(recipes/driver/ahead.py).
"""

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config
from rlpack.recipes import sft
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, WithoutEngines
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
from rlpack.recipes.driver.reward_stages import PendingRewards, collect_greedy_rewards, collect_rewards
from rlpack.recipes.driver.rollout_stages import draw_prompts, generate, generate_greedily
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext


def main(config: Config) -> None:
    """Run the recipe from its start, or from its last checkpoint, to the report."""
    with open_session(config) as session:
        sft.sft_warmup(session)
        train(session)


def draw(session: Session, step: StepContext) -> Batch:
    """Generate the sampled and greedy responses of one step; their rewards are computed in the background."""
    prompts = draw_prompts(session, step)
    sampled, greedy = PendingRewards(session.scorers), PendingRewards(session.scorers)
    with engines_awake(session, step):
        with sampled.collecting(session.config.rollout.engine):
            rollouts = generate(session, step, prompts, sampled.submit)
        with greedy.collecting(session.config.rollout.engine):
            generate_greedily(session, step, prompts, greedy.submit)

    @WithoutEngines
    def score(step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
        return collect_greedy_rewards(session, step, collect_rewards(session, step, rollouts, sampled), greedy)

    return Batch(rollouts, score)


def train(session: Session) -> None:
    """Take `trainer.steps` rollout steps."""
    initialize_reference(session)
    batches = AheadQueue(session, draw)
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
