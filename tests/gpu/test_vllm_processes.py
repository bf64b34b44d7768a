"""vLLM on CUDA: an engine that splits its model frees its GPUs when its rank is killed."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.gpu.test_vllm_weights import pytestmark as gpu_marks
from tests.vllm.test_processes import ENDED_WITHIN_S, is_running, until

pytestmark = [*gpu_marks, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two or four GPUs")]

RANK = """
import time
import psutil
from tests.vllm.engines import start

if __name__ == "__main__":
    engine = start("qwen2", tied=False, device="cuda")
    (core,) = engine._started.processes
    print(core.pid, *(child.pid for child in psutil.Process(core.pid).children(recursive=True)), flush=True)
    time.sleep(600)
"""


def test_engine_core_and_its_workers_end_with_a_rank_that_is_killed(tmp_path: Path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=variables) as rank:
        assert rank.stdout is not None
        ids = next(line.split() for line in rank.stdout if line.replace(" ", "").strip().isdecimal())
        processes = [psutil.Process(int(pid)) for pid in ids]
        assert len(processes) > torch.cuda.device_count()
        rank.kill()
        rank.wait(ENDED_WITHIN_S)
    until(lambda: not any(map(is_running, processes)), ENDED_WITHIN_S)
    left = [process for process in processes if is_running(process)]
    for process in left:
        process.kill()
    assert left == []
