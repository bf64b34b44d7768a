import pytest

from recipes.resuming import check_same_run
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Algorithm, Config


def test_a_kl_term_needs_the_policy_that_the_recipe_began_with():
    saved = Config().model_dump(mode="json")
    config = Config(algorithm=Algorithm(kl_coef=0.1), run_dir="runs/a")
    check_same_run(saved, config, has_reference=True)
    check_same_run(saved, Config(), has_reference=False)
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl_coef is 0\.1, and run_dir=runs/a goes on without a reference"
    ):
        check_same_run(saved, config, has_reference=False)


def test_another_seed_makes_another_run():
    with pytest.raises(ConfigError, match=r"seed is 2 and the checkpoint in run_dir=None was written with 1"):
        check_same_run(Config().model_dump(mode="json"), Config(seed=2))
