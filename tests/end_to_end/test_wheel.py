"""A wheel, as `pip wheel .` builds it, trains in a new environment, outside the repository."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.installs import ROOT, environment_with

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_wheel_trains_in_a_new_environment(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    python = environment_with("wheel", tmp_path_factory.mktemp("wheel"))
    words = ["experiment=smoke", "trainer.steps=1", "sft_warmup.steps=0", "placement.pools.main.ranks=1"]
    run = subprocess.run(
        [python.with_name("rlpack"), "train", "run_dir=run", *words],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["phase"] == "train"] == [1]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "Traceback" not in run.stderr
    assert str(ROOT) not in run.stdout + run.stderr
