import pytest

from recipes.prompts import load_splits
from recipes.resuming import Resumed, check_same_prompts, check_same_run
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Algorithm, Config, Data
from rlpack.data.errors import DataError
from rlpack.data.prompts import Prompts
from tests.builders import tiny_config


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


def test_a_dataset_that_changed_since_the_checkpoint_is_refused(tmp_path):
    def read(answer: str) -> Prompts:
        file = tmp_path / "rows.jsonl"
        file.write_text(f'{{"prompt": "1+1=", "answer": "{answer}"}}\n')
        return load_splits(tiny_config(data=Data(source=str(file), validation_source=str(file))))[1]

    before, after = read("2"), read("3")
    resumed = Resumed(tmp_path / "step-4", {"prompts": before.fingerprint, "held_out": before.fingerprint})
    check_same_prompts(resumed, Config(), read("2"), before)
    with pytest.raises(DataError, match=r"has other rows than when the checkpoint .*step-4 was written; put them back"):
        check_same_prompts(resumed, Config(), after, before)
    with pytest.raises(DataError, match="has other rows"):
        check_same_prompts(resumed, Config(), before, after)
