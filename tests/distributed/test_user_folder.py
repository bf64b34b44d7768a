"""Files of the folder that a run is started in replace no module, and a user's own are found there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
# Names that are a package of rlpack's checkout, modules of the standard library, and an installed package.
SHADOWS = ("workers/__init__.py", "recipes/__init__.py", "random.py", "types.py", "datasets.py")
REWARDS = """
import random, types

def length(completion, **columns):
    return float(len(completion))
"""
JUDGE = """
import random, types
import torch
from rlpack.worker import Worker, sharded

class Judge(Worker):
    @sharded()
    def score(self, shard):
        rewards = torch.tensor([-float(len(text)) for text in shard["completion"]])
        return shard.keep([]).union({"rewards": rewards, "quarantined": rewards > 0})
"""
SCRIPT = """
import os, sys
sys.path.append(os.getcwd())
from rlpack.config.roles import builtin_roles
from rlpack.config.schema import Placement, Pool, Reward, Role
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.start_roles import start_roles
from rlpack.testing import sample_batch
from rlpack.workers.reward import RewardWorker
from tests.builders import tiny_config, tiny_tokenizer

placement = Placement(pools={"main": Pool(ranks=1, cpus_per_rank=0.2)}, roles={}, start_timeout_s=240.0)
roles = {**builtin_roles(), "judge": Role(target="my_judge:Judge")}
config = tiny_config(roles=roles, placement=placement, reward=Reward(function="my_rewards:length"))
with Cluster(placement) as cluster:
    groups = start_roles(cluster, config, ["reward", "judge"], (config, tiny_tokenizer()))
    for name, group in groups.items():
        print(name, group.run(RewardWorker.score, sample_batch(3))["rewards"].tolist())
print("lengths", [float(len(text)) for text in sample_batch(3)["completion"]])
"""


def test_files_of_the_working_directory_shadow_nothing_on_ranks_and_in_reward_processes(tmp_path: Path):
    for name in SHADOWS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise ImportError('{name} of the user was imported')\n")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my_judge.py").write_text(JUDGE)
    run = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    printed = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert printed["reward"] == printed["lengths"]
    assert [-reward for reward in json.loads(printed["judge"])] == json.loads(printed["lengths"])
