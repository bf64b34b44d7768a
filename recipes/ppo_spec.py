"""The spec of PPO: the critic, and the keys that it makes unused."""

from collections.abc import Iterator

from rlpack.config.recipes import RecipeSpec
from rlpack.config.schema import Config


def no_advantage_function(config: Config) -> Iterator[str]:
    """Refuse an advantage function, which would compete with the critic."""
    algorithm = config.algorithm
    if algorithm.advantage != "group_relative" or algorithm.advantage_arguments:
        yield (
            f"algorithm.advantage is {algorithm.advantage!r}, but recipe=ppo computes advantages from the critic "
            "(critic.gamma, critic.gae_lambda, critic.normalize_advantages); leave it unset, or choose another recipe"
        )


def policy_is_trained(config: Config) -> Iterator[str]:
    """Yield a warning if the critic's warm-up lasts to the end of the run."""
    steps = config.trainer.known_steps
    if steps is not None and config.critic.warmup_steps >= steps > 0:
        yield f"critic.warmup_steps is {config.critic.warmup_steps}: the policy itself is never trained"


def actor_reaches_peak_rate(config: Config) -> Iterator[str]:
    """Refuse a warm-up of the actor's learning rate that is longer than the steps which update the actor."""
    steps, optimizer = config.trainer.known_steps, config.actor.optimizer
    warmup = config.critic.warmup_steps
    updated = 0 if steps is None else steps - warmup
    if warmup and 0 < updated <= optimizer.warmup_of(updated):
        yield (
            f"actor.optimizer.warmup_steps ({optimizer.warmup_steps:g}) leaves no step at peak rate, as only {updated} "
            f"of the {steps} trainer.steps follow critic.warmup_steps={warmup} and update the actor; lower either of "
            "them, or raise trainer.steps"
        )


SPEC = RecipeSpec(
    runs_ahead=True,
    draws_once=True,
    takes_late_groups=True,
    roles=("actor", "critic", "rollout", "reward"),
    trains=("actor", "critic"),
    rules=(no_advantage_function, actor_reaches_peak_rate),
    warnings=(policy_is_trained,),
    ignores=dict.fromkeys(
        ("algorithm.advantage", "algorithm.advantage_arguments", "algorithm.baseline", "algorithm.scale"),
        "advantages come from the critic",
    ),
)
