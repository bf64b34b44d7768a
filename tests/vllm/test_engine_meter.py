"""vLLM's own statistics, as the trace and the report get them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpack.rollout.types import SamplingParams
from rlpack.spans import recorded_spans
from tests.vllm.engines import CANARY, prompts_of

ROWS = 12


def windows(folder: Path) -> list[tuple[int, int, dict[str, Any]]]:
    """Return begin, duration and values of each window."""
    (path,) = folder.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert {name for name, *_ in lines} == {"engine"}
    return [tuple(line[1:]) for line in lines]


def test_windows_hold_the_tokens_requests_and_cache_of_an_engine(shared_engine: Any, tmp_path: Path):
    params = SamplingParams(max_new_tokens=90, stop_token_ids=(3,))
    with recorded_spans(tmp_path, "rollout/0"):
        made = shared_engine.generate(prompts_of(*range(1, ROWS + 1)), params, np.arange(ROWS, dtype=np.uint64))
    found = windows(tmp_path)
    assert sum(values["tokens"] for *_, values in found) == len(made.token_ids.values)
    assert max(values["running"] for *_, values in found) <= ROWS
    assert any(values["running"] > ROWS / 4 for *_, values in found)
    assert 0 < max(values["cache"] for *_, values in found) <= 1
    assert all(one[0] + one[1] <= other[0] for one, other in itertools.pairwise(found))
    assert all(duration < 1_000_000 for _, duration, _ in found)


def test_the_canary_counts_and_idle_time_does_not(shared_engine: Any, tmp_path: Path):
    with recorded_spans(tmp_path, "rollout/0"):
        shared_engine.logprobs(torch.as_tensor(CANARY))
        shared_engine._control(shared_engine._engine.reset_prefix_cache(), "reset")
    assert sum(values["tokens"] for *_, values in windows(tmp_path)) == len(CANARY)
