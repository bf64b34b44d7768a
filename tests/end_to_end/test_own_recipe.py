"""A user's recipe, in a package outside of this project, trains by its name alone."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml

from rlpack.cli.main import main
from rlpack.observe.report.report import REPORT
from tests.end_to_end.commands import committed, done, records, steps
from tests.end_to_end.settings import EASY

pytestmark = [pytest.mark.ray, pytest.mark.slow]
RECIPE = '''
    """GRPO with an additional role, trained together with the policy."""

    from pydantic import Field

    from rlpack.config.recipes import RecipeSpec, recipe_section
    from rlpack.config.sections.section import Section
    from rlpack.recipes.driver.engine_weights import sync_weights
    from rlpack.recipes.driver.policy_stages import compute_advantages, compute_old_logprobs, update_actor
    from rlpack.recipes.driver.reward_stages import PendingRewards, collect_rewards
    from rlpack.recipes.driver.rollout_stages import draw_prompts, generate
    from rlpack.recipes.driver.open_session import open_session


    class Mine(Section):
        """What this recipe adds."""

        rate: float = Field(default=0.5, gt=0, description="Learning rate of the role tracker.")


    def rate_is_stable(config):
        if recipe_section(config, Mine).rate > 1:
            yield "my_section.rate is above 1, so the tracker overshoots; lower it"


    def rate_is_slow(config):
        if recipe_section(config, Mine).rate < 0.5:
            yield "my_section.rate is low: the tracker lags"


    SPEC = RecipeSpec(
        own_roles={"tracker": "my_pkg.tracker:Tracker"},
        trains=("actor", "tracker"),
        sections={"my_section": Mine},
        rules=(rate_is_stable,),
        warnings=(rate_is_slow,),
    )


    def main(config):
        """Run the recipe."""
        from my_pkg.tracker import Tracker

        rate = recipe_section(config, Mine).rate
        with open_session(config) as session:
            assert [group.role for group in session.scorers] == ["reward"]
            sync_weights(session)
            for step in session.steps("train", config.trainer.steps):
                rewards = PendingRewards(session.scorers)
                rollouts = generate(session, step, draw_prompts(session, step), rewards.submit)
                plan = session.actor.plan(rollouts, mini_batches=True)
                rollouts = compute_old_logprobs(session, step, rollouts, plan)
                rollouts = collect_rewards(session, step, rollouts, rewards)
                session.groups["tracker"].run(Tracker.train_step, step.metrics["reward/mean"], rate)
                rollouts = compute_advantages(session, step, rollouts, plan)
                update_actor(session, step, rollouts, plan)
                sync_weights(session, step)
'''
ROLE = '''
    import json
    from pathlib import Path

    from rlpack.worker import Trainable, Worker, broadcast


    class Tracker(Worker, Trainable):
        """Follows the mean reward."""

        def __init__(self, context, start=0.0):
            super().__init__(context)
            self.value = start

        @broadcast
        def train_step(self, reward, rate):
            self.value += rate * (reward - self.value)

        @broadcast
        def save(self, folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"rank{self.context.rank}.json").write_text(json.dumps(self.value))

        @broadcast
        def load(self, folder):
            self.value = json.loads((Path(folder) / f"rank{self.context.rank}.json").read_text())

        @broadcast
        def export_model(self, folder):
            if self.context.rank == 0:
                self.save(folder)
'''
COMMAND = (
    *EASY,
    "trainer.prompts_per_step=4",
    "trainer.mini_batch_size=null",
    "recipe.target=my_pkg.my_recipe",
    "roles.tracker.arguments.start=1.0",
    "sft_warmup.steps=0",
    "algorithm.kl_coef=0",
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package `my_pkg`."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "my_pkg").mkdir()
    for name, text in (("__init__", ""), ("my_recipe", RECIPE), ("tracker", ROLE)):
        (folder / "my_pkg" / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def test_a_recipe_outside_the_package_trains_and_resumes_with_a_role_of_its_own(package: Path) -> None:
    run = done(package, *COMMAND, "my_section.rate=0.25", "trainer.steps=1", ranks=1)
    assert "my_section.rate is low: the tracker lags" in run.err
    assert committed(run.run_dir, "train") == [1]
    config = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    assert (config["recipe"], config["my_section"]) == ({"target": "my_pkg.my_recipe"}, {"rate": 0.25})
    assert config["roles"]["tracker"]["target"] == "my_pkg.tracker:Tracker"
    assert "recipe my_recipe" in (run.run_dir / REPORT).read_text()
    run = done(package, *COMMAND, "my_section.rate=0.25", "trainer.steps=2", "resume=auto", ranks=1)
    assert steps(run.run_dir, "train") == [1, 2]
    trained = [record for record in records(run.run_dir) if record["phase"] == "train"]
    assert all(record["actor/grad_norm"] >= 0 for record in trained)
    expected = 1.0
    for record in trained:
        expected += 0.25 * (record["reward/mean"] - expected)
    exported = json.loads((run.run_dir / "tracker_model" / "rank0.json").read_text())
    assert exported == pytest.approx(expected, abs=1e-12)
    assert (run.run_dir / "model" / "model.safetensors").exists()


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("my_section.rate=2", "my_section.rate is above 1, so the tracker overshoots; lower it"),
        ("roles.tracker.target=my_pkg.tracker:Worker", "Worker does not derive from rlpack.worker.Trainable"),
    ],
)
def test_its_keys_rules_and_roles_are_checked_before_anything_starts(
    package: Path,
    override: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(package)
    assert main(["train", *COMMAND, override, f"run_dir={package / 'refused'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (package / "refused" / "config.yaml").exists()
