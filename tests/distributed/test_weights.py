from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.distributed.errors import RoleError
from rlpack.distributed.weights import WeightChannel
from rlpack.distributed.worker_group import WorkerGroup
from tests.builders import tiny_rollouts
from tests.distributed.roles import Echo
from tests.distributed.test_worker_group import ends, prompt_failure

pytestmark = [pytest.mark.ray, pytest.mark.slow]
EXTRA_POOLS = ("dies", "exports", "imports", "lost")

Groups = dict[str, WorkerGroup[Any]]
ROWS = tiny_rollouts([(1, 1), (1, 1)]).keep(["input_ids"])


def test_buckets_reach_every_rank_in_the_targets_dtype_with_two_in_flight(groups: Groups, tmp_path: Path):
    notes = tmp_path / "notes"
    for name in ("packed", "lost"):
        groups[name].run(Echo.note_into, str(notes))
    WeightChannel(groups["packed"], groups["lost"]).transfer()
    expected = {f"weight {index}": torch.full((index + 1,), index + 1.0, dtype=torch.bfloat16) for index in range(5)}
    for loaded in groups["lost"].run(Echo.loaded_weights, ROWS):
        assert list(loaded) == list(expected)
        assert all(weight.dtype == torch.bfloat16 and weight.equal(expected[name]) for name, weight in loaded.items())
    lines = notes.read_text().splitlines()
    assert len(lines) == 5 + 5 * 2
    for index in range(2, 5):
        before = lines[: lines.index(f"export {index}")]
        assert before.count(f"load {index - 2}") == 2  # on both ranks of the target


def test_a_failed_export_is_named_though_other_ranks_wait_in_a_collective_and_loads_wait_for_it(groups: Groups):
    with prompt_failure() as failure:
        WeightChannel(groups["exports"], groups["imports"]).transfer()
    assert isinstance(failure.value, RoleError)
    expected = "role exports, rank 1, in export_bucket: ExportError: no weights: nothing to export"
    assert str(failure.value).startswith(expected)
    assert ends(groups["exports"], 0)
    assert ends(groups["imports"], 0)


def test_the_death_of_an_exporting_rank_is_named_though_others_wait_for_it(groups: Groups):
    with prompt_failure() as failure:
        WeightChannel(groups["dies"], groups["lost"]).transfer()
    assert (failure.value.role, failure.value.rank, failure.value.method) == ("dies", 1, "export_bucket")
    assert "the process died" in failure.value.cause
    assert ends(groups["lost"], 0)
