"""Files of the folder that a run is started in replace no module, and a user's own are found there."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.installs import add_unfortunate_files, environment_with

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REWARDS = """
import random, types

def length(completion, **columns):
    return float(len(completion))
"""
JUDGE = """
import random, types, workers
import torch
from rlpack.worker import Worker, sharded

assert workers.OWNER == "user"

class Judge(Worker):
    @classmethod
    def from_settings(cls, context, config, tokenizer):
        return cls(context)

    @sharded()
    def score(self, shard):
        rewards = torch.tensor([-float(len(text)) for text in shard["completion"]])
        return shard.keep([]).union({"rewards": rewards, "quarantined": rewards > 0})
"""
RECIPE = """
import json
import rlpack
from rlpack.config.recipes import RecipeSpec
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.start_roles import start_roles
from rlpack.testing import sample_batch, sample_tokenizer
from rlpack.workers.reward import RewardWorker

SPEC = RecipeSpec(roles=("reward",), trains=())


def main(config):
    with Cluster(config.placement, config.job) as cluster:
        groups = start_roles(cluster, config, ["reward", "judge"], (config, sample_tokenizer()))
        scores = [group.run(RewardWorker.score, sample_batch(3))["rewards"].tolist() for group in groups.values()]
    lengths = [float(len(text)) for text in sample_batch(3)["completion"]]
    print(json.dumps({"rlpack": rlpack.__file__, "scores": scores, "lengths": lengths}))
"""
# Runs the command twice: on its own local Ray, and on a cluster that it joins.
SCRIPT = """
import sys
from ray.cluster_utils import Cluster
from rlpack.cli.main import main

words = [*sys.argv[1:], "placement.pools.main.ranks=1", "placement.pools.main.cpus_per_rank=0.2"]
codes = [main(["train", *words])]
head = {"num_cpus": 1, "object_store_memory": 2**27, "include_dashboard": False}
machines = Cluster(initialize_head=True, head_node_args=head)
codes.append(main(["train", *words, f"placement.address={machines.address}"]))
machines.shutdown()
sys.exit(max(codes))
"""


@pytest.mark.parametrize("kind", [pytest.param("wheel", marks=pytest.mark.long), "editable"])
def test_files_of_the_working_directory_shadow_nothing_on_ranks_and_in_reward_processes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
):
    python = environment_with(kind, tmp_path_factory.mktemp(kind))
    add_unfortunate_files(tmp_path)
    for name in ("rlpack.py", "torch.py", "ray/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError(__file__)\n")
    for name, code in (("my_rewards", REWARDS), ("my_judge", JUDGE), ("my_recipe", RECIPE)):
        (tmp_path / f"{name}.py").write_text(code)
    words = ["recipe.target=my_recipe", "sft_warmup.steps=0", "reward.function=my_rewards:length"]
    run = subprocess.run(
        [python, "-P", "-c", SCRIPT, *words, "roles.judge.target=my_judge:Judge"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 2
    for result in results:
        assert result["scores"] == [result["lengths"], [-length for length in result["lengths"]]]
        assert (python.parents[1] in Path(result["rlpack"]).parents) == (kind == "wheel")
