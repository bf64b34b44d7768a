"""Rules of `algorithm`: bounds of the ratio, aggregation, and the KL term."""

from collections.abc import Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.schema import Config

# Losses that clip ratios at 1 - `clip_low` and 1 + `clip_high`. Others read them as bounds of their own, or not at all.
_CLIPPING_RATIOS = ("ppo_clip", "gspo")


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield the problems of `algorithm`; keys that the recipe doesn't read are no problem."""
    yield from _bounds(config)
    yield from _aggregation(config)
    yield from _kl(config)


def _bounds(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.loss not in _CLIPPING_RATIOS or "algorithm.loss" in recipe_of(config).ignores:
        return
    if algorithm.clip_low > algorithm.clip_high:
        yield (
            f"algorithm.clip_low ({algorithm.clip_low}) exceeds algorithm.clip_high ({algorithm.clip_high}); lower "
            "algorithm.clip_low or raise algorithm.clip_high"
        )
    if algorithm.clip_low == 1:
        yield "algorithm.clip_low is 1, which is not a lower bound; set it below 1, or set algorithm.loss=cispo"


def _aggregation(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    needs_constant = algorithm.aggregation == "seq_mean_token_sum_norm"
    if needs_constant and algorithm.aggregation_constant is None:
        yield (
            "algorithm.aggregation=seq_mean_token_sum_norm divides by a constant; set algorithm.aggregation_constant, "
            f"for example to rollout.max_new_tokens ({config.rollout.max_new_tokens})"
        )
    if not needs_constant and algorithm.aggregation_constant is not None:
        yield (
            f"algorithm.aggregation_constant is {algorithm.aggregation_constant}, but algorithm.aggregation is "
            f"{algorithm.aggregation}; set algorithm.aggregation=seq_mean_token_sum_norm, or the constant to null"
        )


def _kl(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if "algorithm.kl_coef" in recipe_of(config).ignores:
        return
    if algorithm.kl_coef > 0:
        if "reference" not in config.roles:
            yield f"algorithm.kl_coef is {algorithm.kl_coef}, which needs the role reference; keep roles.reference"
        return
    unused = {}  # each with the value that leaves it out
    if algorithm.kl_target is not None:
        unused[f"algorithm.kl_target={algorithm.kl_target:g}"] = "algorithm.kl_target=null"
    if algorithm.kl_placement == "reward":
        unused["algorithm.kl_placement=reward"] = "algorithm.kl_placement=loss"
    if unused:
        yield (
            f"algorithm.kl_coef is 0, so {' and '.join(unused)} would have no effect; set algorithm.kl_coef above 0, "
            f"or {' '.join(unused.values())}"
        )
