"""Warnings about losses and KL terms that have no effect, or not the expected one."""

from collections.abc import Iterator

from rlpack.config.batching_warnings import has_several_steps
from rlpack.config.recipes import recipe_of
from rlpack.config.schema import Config


def algorithm_warnings(config: Config) -> Iterator[str]:
    """Yield choices in `algorithm` that are valid and probably a mistake."""
    if recipe_of(config).generates:
        yield from _kl_term(config)
        yield from _stale_samples(config)
        yield from _no_penalty(config)


def _kl_term(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_coef == 0:
        return
    if algorithm.kl_placement == "loss" and algorithm.kl_estimator == "k1" and not algorithm.kl_straight_through:
        yield (
            "algorithm.kl_estimator is k1 and algorithm.kl_placement is loss: the gradient of k1 is the same whether "
            "the policy is near the reference or far from it, and 0 on average, so the KL term has no effect; set "
            "algorithm.kl_straight_through=true, or algorithm.kl_estimator=k3 (or k2)"
        )
    is_scaled = algorithm.advantage == "group_relative" and algorithm.scale == "std"
    if algorithm.kl_placement == "reward" and is_scaled and "algorithm.scale" not in recipe_of(config).ignores:
        yield (
            "algorithm.kl_placement is reward and algorithm.scale is std: in a group whose responses have equal "
            "rewards, advantages come from the KL term alone, and dividing by the standard deviation scales them to "
            "full size, whatever algorithm.kl_coef is; set algorithm.kl_placement=loss, or algorithm.scale=none"
        )


def _stale_samples(config: Config) -> Iterator[str]:
    algorithm, trainer = config.algorithm, config.trainer
    if algorithm.loss != "reinforce":
        return
    if config.recipe.target.startswith("rlpack.") and has_several_steps(trainer):
        yield (
            f"algorithm.loss is reinforce, which has no ratio, but a batch is several optimizer steps "
            f"(trainer.mini_batch_size={trainer.mini_batch_size}, "
            f"trainer.updates_per_batch={trainer.updates_per_batch}): all but the first train on responses of an older "
            "policy without any correction; set trainer.mini_batch_size=null trainer.updates_per_batch=1, or another "
            "loss, such as algorithm.loss=ppo_clip"
        )
    if algorithm.correction.bypass:
        yield (
            "algorithm.correction.bypass is true but unused: algorithm.loss=reinforce has no ratio that could be taken "
            "to the sampler's log-probs; set algorithm.loss=cispo, or another loss with a ratio"
        )


def _no_penalty(config: Config) -> Iterator[str]:
    is_one_step = config.recipe.target.startswith("rlpack.") and not has_several_steps(config.trainer)
    if config.algorithm.loss == "kl_cov" and is_one_step and not config.algorithm.correction.bypass:
        yield (
            "algorithm.loss is kl_cov, but a batch is one optimizer step: the policy is still the old one, so the "
            "penalty on its distance has no gradient; set trainer.mini_batch_size below a rollout batch, or "
            "trainer.updates_per_batch to 2 or more"
        )
