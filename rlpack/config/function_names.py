"""The names of losses and advantages, which `rlpack.algorithms.registry` defines, without importing PyTorch."""

from collections.abc import Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.schema import Config

LOSSES = ("ppo_clip", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce", "kl_cov")
ADVANTAGES = ("group_relative", "opo", "remax", "reinforce_pp")


def function_name_problems(config: Config) -> Iterator[str]:
    """Yield losses and advantages that are neither a name nor a function of the user's."""
    spec, algorithm = recipe_of(config), config.algorithm
    for key, name, known in (
        ("algorithm.loss", algorithm.loss, LOSSES),
        ("algorithm.advantage", algorithm.advantage, ADVANTAGES),
    ):
        if spec.generates and key not in spec.ignores and ":" not in name and name not in known:
            yield f"{key} is {name!r}; set it to one of {', '.join(known)}, or to package.module:function"
