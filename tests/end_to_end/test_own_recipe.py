"""A recipe of a user's own, in a package outside of this project, trains by its name alone."""

import textwrap

import pytest
import yaml

from rlpack.observe.report.report import REPORT
from tests.end_to_end.commands import committed, done, records, started, steps
from tests.end_to_end.settings import EASY

pytestmark = [pytest.mark.ray, pytest.mark.slow]
RECIPE = '''
    """GRPO without a warm-up, for as many steps as its own section says."""

    from pydantic import Field

    from rlpack.config.recipes import RecipeSpec, recipe_section
    from rlpack.config.sections.section import Section
    from rlpack.recipes import grpo
    from rlpack.recipes.driver.session import open_session


    class Mine(Section):
        """What this recipe adds."""

        key: int = Field(default=1, ge=1, description="Steps.")


    SPEC = RecipeSpec(sections={"my_section": Mine})


    def main(config):
        """Run the recipe."""
        steps = recipe_section(config, Mine).key
        trainer = config.trainer.model_copy(update={"steps": steps})
        with open_session(config.model_copy(update={"trainer": trainer})) as session:
            grpo.train(session)
'''


def test_a_recipe_outside_the_package_trains_and_resumes(tmp_path) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").touch()
    (tmp_path / "my_pkg" / "my_recipe.py").write_text(textwrap.dedent(RECIPE))
    command = (
        *EASY,
        "trainer.prompts_per_step=4",
        "trainer.mini_batch_size=null",
        "recipe.target=my_pkg.my_recipe",
        "sft_warmup.steps=0",
        "algorithm.kl_coef=0",
    )
    with started(tmp_path, *command, "my_section.kay=3", run_dir="refused") as refused:
        assert refused.wait() == 2
    assert "my_section.kay is not a key; did you mean my_section.key?" in refused.err
    run = done(tmp_path, *command, "my_section.key=3")
    assert steps(run.run_dir, "train") == [1, 2, 3]
    assert committed(run.run_dir, "train") == [3]
    config = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    assert (config["recipe"], config["my_section"]) == ({"target": "my_pkg.my_recipe"}, {"key": 3})
    assert "recipe my_recipe" in (run.run_dir / REPORT).read_text()
    done(tmp_path, *command, "my_section.key=4", "resume=auto")
    assert steps(run.run_dir, "train") == [1, 2, 3, 4]
    assert all(record["actor/grad_norm"] >= 0 for record in records(run.run_dir) if record["phase"] == "train")
