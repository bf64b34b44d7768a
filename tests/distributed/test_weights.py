from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlpack.batch.bucket import Bucket
from rlpack.distributed.errors import RoleError
from rlpack.distributed.weights import WeightChannel
from rlpack.distributed.worker_group import WorkerGroup
from tests.builders import tiny_rollouts
from tests.distributed.roles import Echo
from tests.distributed.test_worker_group import ends, prompt_failure
from tests.weight_faults import FAULTS, Fault, ObjectStoreTransport, check_fault, check_no_fault

pytestmark = [pytest.mark.ray, pytest.mark.slow]
EXTRA_POOLS = ("dies", "exports", "imports", "lost", "damaged", "incomplete", "reordered", "late")

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


def through_the_store(bucket: Bucket) -> Bucket:
    """Return a bucket as another process reads it: mapped in place, read-only."""
    return ray.get(ray.put(bucket), timeout=60)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_on_the_way_through_the_object_store_is_named_before_a_token_is_sampled(groups: Groups, fault: Fault):
    check_fault(ObjectStoreTransport(through_the_store), fault)


def test_an_update_that_goes_through_the_object_store_unharmed_is_published(groups: Groups):
    check_no_fault(ObjectStoreTransport(through_the_store))


def relays_changed(monkeypatch: pytest.MonkeyPatch, channel: WeightChannel[Any, Any], *indices: int) -> None:
    """Make a channel send only these buckets of an update, in this order."""
    buckets = channel._buckets
    monkeypatch.setattr(channel, "_buckets", lambda version: [buckets(version)[index] for index in indices])


def refusal(group: WorkerGroup[Any], channel: WeightChannel[Any, Any], method: str) -> str:
    """Transfer; return why the target refused it, after which none of its ranks is left to use the weights."""
    with prompt_failure() as failure:
        channel.transfer()
    assert (failure.value.role, failure.value.method) == (group.role, method)
    assert ends(group, 0)
    assert channel.version == 0
    return failure.value.cause


@pytest.mark.parametrize(
    ("role", "indices", "method", "words"),
    [
        ("incomplete", (0, 1, 2, 3), "finish_transfer", "bucket 5 of 5 of policy version 1 has not arrived"),
        ("reordered", (0, 2, 1, 3, 4), "load_bucket", "bucket 3 of 5 of policy version 1 came where bucket 2 was due"),
    ],
)
def test_a_bucket_that_is_lost_or_late_ends_the_ranks(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, role: str, indices: tuple[int, ...], method: str, words: str
):
    channel = WeightChannel(groups[role], groups[role])
    relays_changed(monkeypatch, channel, *indices)
    assert refusal(groups[role], channel, method).startswith(f"EngineError: role echo: {words}")


def test_a_bit_that_flips_after_a_bucket_was_packed_ends_the_ranks(groups: Groups):
    group = groups["damaged"]
    group.run(Echo.harm_bucket, 2, "bit flip")
    cause = refusal(group, WeightChannel(group, group), "load_bucket")
    assert cause.startswith("EngineError: role echo: bucket 3 of 5 of policy version 1 was corrupted in transit")


def test_a_bucket_that_misses_the_deadline_ends_the_ranks(groups: Groups, monkeypatch: pytest.MonkeyPatch):
    group = groups["late"]
    channel = WeightChannel(group, group)
    group.run(Echo.harm_bucket, 2, "delay")
    monkeypatch.setattr(group.ranks, "_call_s", 2.0)
    # One group is source and target here: the load that waits for the export is a call of its rank 0, too.
    assert refusal(group, channel, "export_bucket").startswith("no answer from rank 0 within 2 s; raise")


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
