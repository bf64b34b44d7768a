from pathlib import Path

import pytest

from rlpack.config.compose import groups
from rlpack.config.preset_defaults import Presets, defaults_problems

FINE = {
    "overrides": [{"override /model": "small"}, {"override /data": "jsonl"}],
    "itself in the middle": ["smoke", "_self_"],
    "another experiment": ["/experiment/smoke", {"override /model": "small.yaml"}],
    "a group of the user's own": [{"/mine": "one"}],
    "a nested group of the user's own": [{"/mine/deep": "two"}],
    "a preset that may be missing": [{"optional /mine": "three"}],
    "an interpolation": [{"override /model": "${data}"}],
    "Hydra's own groups": [{"override /hydra/launcher": "basic"}],
    "nothing": [],
}


@pytest.mark.parametrize("name", FINE)
def test_what_hydra_composes_is_no_problem(tmp_path, name):
    for group, choice in (("mine", "one"), ("mine/deep", "two"), ("experiment", "own")):
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / f"{choice}.yaml").write_text("a: 1\n")
    folders = [tmp_path]
    presets = Presets(groups([Path("configs"), *folders]), groups(), folders)
    assert list(defaults_problems(tmp_path / "experiment/own.yaml", "experiment", FINE[name], presets)) == []
