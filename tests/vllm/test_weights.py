"""Weights on their way to vLLM: each fault is detected before a token is sampled, and 100 updates all arrive."""

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import Bucket, pack_bucket
from rlpack.distributed.context import RankContext
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import TOLERANCES
from rlpack.rollout.errors import CanaryError, EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm import vllm_engine
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.rollout.vllm.weight_files import PREFIX, SHARED_MEMORY, BucketNote, written
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_rollouts
from tests.vllm.engines import CANARY, TOKENIZER, gap, perturb, policy, prompts_of, reference, sampled, send, start
from tests.weight_faults import FAULTS, Fault, check_fault, check_no_fault

BUCKET_BYTES = 200_000


class VLLMTransport:
    """Buckets to a `RolloutWorker` with vLLM; version 1 is published, and version 2 on its way."""

    errors = (EngineError,)

    def __init__(self, engine: VLLMEngine) -> None:
        self.worker = RolloutWorker(RankContext(), engine, TOKENIZER, canary_tolerance=TOLERANCES[torch.float32])
        self._update_to(1, seed=21)
        self.worker.check_weights(self._layout)
        for index in range(self.count):
            self.deliver(self.export(index))
        self.publish()
        self._update_to(2, seed=22)

    def _update_to(self, version: int, seed: int) -> None:
        built = policy("qwen2", tied=False, seed=seed)
        stream = WeightStream(built, torch.float32, bucket_bytes=BUCKET_BYTES)
        self._version, self._weights, self._layout = version, list(stream), stream.layout
        self.count = len(self._weights)
        self._expected = reference(built, CANARY).numpy()

    def export(self, index: int) -> Bucket:
        return pack_bucket(self._weights[index], index=index, count=self.count, version=self._version)

    def truncate(self, parcel: Bucket) -> Bucket:
        name = list(parcel.arrays)[-1]
        array, dtype = parcel.arrays[name]
        return parcel._replace(arrays=parcel.arrays | {name: (array[:-1], dtype)})

    def flip_bit(self, parcel: Bucket) -> Bucket:
        name = next(iter(parcel.arrays))
        array, dtype = parcel.arrays[name]
        damaged = array.copy()
        damaged.reshape(-1).view(np.uint32)[0] ^= 1  # which no canary sees
        return parcel._replace(arrays=parcel.arrays | {name: (damaged, dtype)})

    def deliver(self, parcel: Bucket) -> None:
        self.worker.load_bucket(parcel, self._version)

    def publish(self) -> None:
        self.worker.publish(self._expected, CANARY, self._version)

    def sampled_versions(self) -> set[int]:
        batch: BatchedDataDict = tiny_rollouts([(3, 0), (5, 0)]).keep(["input_ids", "group_ids", "uid"])
        made = self.worker.generate(batch.union({"seeds": torch.tensor([5, 6])}), SamplingParams(max_new_tokens=2))
        return set(made["policy_version"].values[made["response_mask"].values].tolist())


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_on_the_way_to_the_rank_is_detected_and_named_before_a_token_is_sampled(
    shared_engine: VLLMEngine, fault: Fault
):
    check_fault(VLLMTransport(shared_engine), fault)


def test_an_update_without_a_fault_is_published(shared_engine: VLLMEngine):
    check_no_fault(VLLMTransport(shared_engine))


def files_of_weights() -> set[Path]:
    return set(SHARED_MEMORY.glob(f"{PREFIX}*"))


Damage = Callable[[BucketNote], BucketNote]


def cut(note: BucketNote) -> BucketNote:
    os.truncate(note.path, note.num_bytes - 4)
    return note


def flip(note: BucketNote) -> BucketNote:
    data = bytearray(Path(note.path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(note.path).write_bytes(data)
    return note


def remove(note: BucketNote) -> BucketNote:
    Path(note.path).unlink()
    return note


FILE_FAULTS: dict[str, tuple[Damage, str]] = {
    "cut": (cut, r"bucket {} of the weights has \d+ bytes in \S+, not \d+"),
    "bit flip": (flip, "bucket {} of the weights was changed on its way: its digest is"),
    "missing": (remove, "bucket {} of the weights can't be read from .*No such file"),
    "drop": (lambda note: replace(note, index=note.index + 1), r"arrived where bucket {} was expected"),
    "duplicate": (lambda note: replace(note, index=max(0, note.index - 1)), r"arrived where bucket {} was expected"),
}
CASES = [
    pytest.param(kind, place, id=f"{kind} {place}")
    for kind in FILE_FAULTS
    for place in ("first", "middle", "last")
    if (kind, place) != ("duplicate", "first")  # nothing comes before it
]


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_a_fault_between_rank_and_engine_is_detected_and_named_before_a_token_is_sampled(
    shared_engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, kind: str, place: str
):
    damage, words = FILE_FAULTS[kind]
    transport, before = VLLMTransport(shared_engine), files_of_weights()
    at = {"first": 0, "middle": transport.count // 2, "last": transport.count - 1}[place]

    @contextmanager
    def damaged(weights: Any, index: int) -> Any:
        with written(weights, index) as note:
            yield damage(note) if index == at else note

    monkeypatch.setattr(vllm_engine, "written", damaged)
    for index in range(at):
        transport.deliver(transport.export(index))
    named = rf"role rollout: bucket {at + 1} of {transport.count} of policy version 2 was not loaded: vLLM could not "
    with pytest.raises(EngineError, match=named + f".*EngineError: .*{words.format(at)}"):
        transport.deliver(transport.export(at))
    for refused in (lambda: transport.deliver(transport.export(at)), transport.publish, transport.sampled_versions):
        with pytest.raises(EngineError):
            refused()
    assert files_of_weights() <= before


def test_the_engine_itself_refuses_what_follows_a_bucket_that_failed_until_the_update_begins_again(
    shared_engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
):
    built = policy("qwen2", tied=False, seed=31)
    stream = WeightStream(built, torch.float32, bucket_bytes=BUCKET_BYTES)
    buckets = list(stream)
    shared_engine.check_weights(stream.layout)
    shared_engine.load_bucket(buckets[0])
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "written", lambda weights, index: damaged_by(cut, weights, index))
        with pytest.raises(EngineError, match=r"has \d+ bytes"):
            shared_engine.load_bucket(buckets[1])
    with pytest.raises(EngineError, match="call check_weights to begin again"):
        shared_engine.load_bucket(buckets[1])
    with pytest.raises(EngineError, match="no bucket of weights arrived"):
        shared_engine.finish_update()
    send(shared_engine, built)
    assert gap(shared_engine, built) <= 1e-4


@contextmanager
def damaged_by(damage: Damage, weights: Any, index: int) -> Any:
    with written(weights, index) as note:
        yield damage(note)


@pytest.mark.parametrize("count", [1, 3])
def test_an_update_that_stopped_halfway_leaves_nothing_in_the_next_one(shared_engine: VLLMEngine, count: int):
    older, newer = (policy("qwen2", tied=False, seed=seed) for seed in (32, 33))
    stream = WeightStream(older, torch.float32, bucket_bytes=BUCKET_BYTES)
    shared_engine.check_weights(stream.layout)
    for index in range(count):
        shared_engine.load_bucket(stream.gather(index))
    send(shared_engine, newer)
    assert gap(shared_engine, newer) <= 1e-4


def test_weights_of_another_model_are_refused_by_name(shared_engine: VLLMEngine):
    stream = WeightStream(policy("qwen3", tied=False), torch.float32)
    with pytest.raises(EngineError, match=r"weights do not fit: missing \[.*q_proj\.bias.*unknown \[.*q_norm"):
        shared_engine.check_weights(stream.layout)


def test_weights_that_are_not_the_trainers_fail_the_canary_and_nothing_is_sampled(shared_engine: VLLMEngine):
    transport = VLLMTransport(shared_engine)
    for index in range(transport.count):
        transport.deliver(transport.export(index))
    transport._expected[0, 5] += 0.01
    with pytest.raises(CanaryError, match="policy version 2"):
        transport.publish()
    with pytest.raises(EngineError, match="no usable weights"):
        transport.sampled_versions()


@pytest.mark.slow
def test_100_updates_in_a_row_all_arrive_at_2_engines(shared_engine: VLLMEngine):
    built = policy("qwen2", tied=False, seed=41)
    second = start("qwen2", tied=False, seed=1)
    try:
        for version in range(1, 101):
            perturb(built, 1000 + version, 0.003)
            expected = reference(built, CANARY)
            gaps = []
            for engine in (shared_engine, second):
                before = (engine.logprobs(CANARY) - expected).abs().max().item()
                send(engine, built, bucket_bytes=BUCKET_BYTES)
                engine.policy_version = version
                gaps.append((engine.logprobs(CANARY) - expected).abs().max().item())
                assert max(gaps) <= 1e-4 < before, version
            params = SamplingParams(max_new_tokens=2)
            made = [sampled(engine, prompts_of(3, 4), params) for engine in (shared_engine, second)]
            assert made[0].token_ids.values.equal(made[1].token_ids.values)
            assert made[0].logprobs.values.equal(made[1].logprobs.values)
            assert {version} == set(torch.cat([one.policy_versions.values for one in made]).tolist())
    finally:
        second.close()


def test_vllm_packs_a_copy_of_a_tied_output_layer_which_is_why_it_is_sent_under_both_names():
    """The control of the canary: without the output layer's own name its copy stays old, in silence."""
    engine, built = start("qwen2", tied=True), policy("qwen2", tied=True)
    try:
        send(engine, built)
        assert gap(engine, built) <= 1e-4
        perturb(built, 5, 0.05)
        engine._aliases = {}
        send(engine, built)
        assert gap(engine, built) > 1e-2
        engine._aliases = {"model.embed_tokens.weight": ["lm_head.weight"]}
        send(engine, built)
        assert gap(engine, built) <= 1e-4
    finally:
        engine.close()
