"""The recipe that is found before a command line is composed is the one that Hydra then composes."""

from pathlib import Path

import pytest
import yaml

from rlpack.cli.train import compose_jobs
from rlpack.config.compose import PRESETS
from rlpack.config.recipe_targets import recipe_targets

DAPO, PPO, REMAX = ("rlpack.recipes." + name for name in ("dapo", "ppo", "remax"))


def written(folder: Path, presets: dict[str, dict]) -> list[str]:
    """Write presets by path below a config directory, and return the flags that choose it."""
    for name, values in presets.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{yaml.safe_dump(values)}")
    return ["--config-dir", str(folder)]


def chooses(recipe: str) -> dict[str, str]:
    return {"override /recipe": recipe}


def sets(target: str) -> dict[str, dict[str, str]]:
    return {"recipe": {"target": target}}


# Presets below `experiment`, of which `mine` is chosen.
EXPERIMENTS = {
    "an included choice": ({"base": {"defaults": [chooses("dapo")]}, "mine": {"defaults": ["base", "_self_"]}}, DAPO),
    "an absolute name": (
        {"base": {"defaults": [chooses("dapo")]}, "mine": {"defaults": ["/experiment/base", "_self_"]}},
        DAPO,
    ),
    "two levels and a folder": (
        {
            "deep/base": {"defaults": [chooses("dapo")]},
            "deep/middle": {"defaults": ["base", "_self_"], "seed": 3},
            "mine": {"defaults": ["deep/middle", "_self_"]},
        },
        DAPO,
    ),
    "a choice before that of an include": (
        {
            "base": {"defaults": [chooses("dapo")]},
            "mine": {"defaults": ["_self_", "base", chooses("ppo")], "seed": 3},
        },
        PPO,
    ),
    "the later one of two includes": (
        {
            "one": {"defaults": [chooses("dapo")]},
            "two": {"defaults": [chooses("ppo")]},
            "mine": {"defaults": ["one", "two", "_self_"]},
        },
        PPO,
    ),
    "an included target before a choice": (
        {"base": sets(REMAX), "mine": {"defaults": ["base", "_self_", chooses("ppo")]}},
        REMAX,
    ),
    "its target after an include": ({"base": sets(REMAX), "mine": {"defaults": ["base", "_self_"], **sets(PPO)}}, PPO),
    "its target before an include": (
        {"base": sets(REMAX), "mine": {"defaults": ["_self_", "base"], **sets(PPO)}},
        REMAX,
    ),
    "its target without _self_": ({"base": sets(REMAX), "mine": {"defaults": ["base"], **sets(PPO)}}, PPO),
}


@pytest.mark.parametrize(("presets", "target"), EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_an_experiment_runs_the_recipe_of_presets_that_it_includes(tmp_path: Path, presets: dict, target: str):
    flags = written(tmp_path, {f"experiment/{name}": values for name, values in presets.items()})
    (job,) = compose_jobs([*flags, "experiment=mine"])
    assert job.config.recipe.target == target
    assert recipe_targets(["experiment=mine"], [PRESETS, tmp_path]) == [target]


def test_a_recipe_may_include_another_one(tmp_path: Path):
    flags = written(tmp_path, {"recipe/mine": {"defaults": ["dapo", "_self_"], "seed": 3}})
    assert compose_jobs([*flags, "recipe=mine"])[0].config.recipe.target == DAPO
    assert recipe_targets(["recipe=mine"], [PRESETS, tmp_path]) == [DAPO]


@pytest.mark.parametrize("preset", ["experiment", "recipe"])
def test_keys_of_the_section_of_an_included_recipe_are_known(tmp_path: Path, preset: str):
    flags = written(
        tmp_path,
        {
            "experiment/base": {"defaults": [chooses("dapo")]},
            "experiment/mine": {"defaults": ["base", "_self_"]},
            "recipe/mine": {"defaults": ["dapo", "_self_"]},
        },
    )
    (job,) = compose_jobs([*flags, f"{preset}=mine", "dapo.max_rounds=2"])
    assert job.config.recipe.target == DAPO
    assert job.config.model_dump()["dapo"]["max_rounds"] == 2


def test_a_root_config_may_include_another_one(tmp_path: Path):
    flags = written(
        tmp_path,
        {
            "outer": {"defaults": ["inner", "_self_"], "seed": 3},
            "inner": {"defaults": ["train", "_self_", chooses("dapo")]},
        },
    )
    (job,) = compose_jobs([*flags, "--config-name=outer", "dapo.max_rounds=2"])
    assert (job.config.recipe.target, job.config.seed) == (DAPO, 3)
    assert recipe_targets([], [PRESETS, tmp_path], "outer") == [DAPO]
