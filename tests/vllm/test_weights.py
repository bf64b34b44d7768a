"""Weights on their way to vLLM: each fault is detected before a token is sampled, and 100 updates all arrive."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
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
from rlpack.rollout.errors import BucketError, CanaryError, EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.device_buffers import CUDA_IPC, DeviceBuffers
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.rollout.vllm.weight_buffers import BucketNote, WeightBuffers
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_rollouts
from tests.vllm.engines import (
    CANARY,
    TOKENIZER,
    gap,
    perturb,
    policy,
    prompts_of,
    reference,
    sampled,
    send,
    start,
    why_not_direct,
)
from tests.weight_faults import FAULTS, Fault, check_fault, check_no_fault

BUCKET_BYTES = 200_000


class VLLMTransport:
    """Buckets to a `RolloutWorker` with vLLM; version 1 is published, and version 2 on its way."""

    errors = (EngineError,)

    def __init__(self, engine: VLLMEngine, family: str = "qwen2") -> None:
        self._family = family
        self.worker = RolloutWorker(RankContext(), engine, TOKENIZER, canary_tolerance=TOLERANCES[torch.float32])
        self._update_to(1, seed=21)
        self.worker.check_weights(self._layout)
        for index in range(self.count):
            self.deliver(self.export(index))
        self.publish()
        self._update_to(2, seed=22)

    def _update_to(self, version: int, seed: int) -> None:
        built = policy(self._family, tied=False, seed=seed)
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


Damage = Callable[[BucketNote], BucketNote]


def cut(note: BucketNote) -> BucketNote:
    os.truncate(note.path, note.num_bytes - 4)
    return note


def flip(note: BucketNote) -> BucketNote:
    with Path(note.path).open("r+b") as file:
        file.seek(note.num_bytes // 2)
        bits = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([bits ^ 1]))
    return note


@contextmanager
def damaged(at: int, damage: Damage) -> Iterator[None]:
    """Damage a bucket between the rank and vLLM's process."""
    write, sizes = WeightBuffers.write, {}

    def damaging(self: WeightBuffers, weights: Any, index: int) -> BucketNote:
        note = write(self, weights, index)
        if index != at:
            return note
        sizes[note.path] = Path(note.path).stat().st_size
        return damage(note)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightBuffers, "write", damaging)
        yield
    for path, size in sizes.items():  # the rank has mapped all of it
        os.truncate(path, size)


class FaultyWay:
    """vLLM's front end, on whose way to vLLM's process the note of one bucket is lost, late, repeated or overtaken."""

    def __init__(self, front_end: Any, fault: Fault, count: int) -> None:
        self._front_end, self._kind, self._at = front_end, fault.kind, fault.index(count)
        if fault.kind == "reorder" and self._at == count - 1:
            self._at -= 1
        self._overtaken = asyncio.Event()
        self.late: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._front_end, name)

    async def update_weights(self, request: Any) -> None:
        index = request.update_info.get("note", {}).get("index")
        if index == self._at and self._kind in {"drop", "delay"}:
            self.late = request
            return
        if index == self._at and self._kind == "reorder":
            await self._overtaken.wait()
        for _ in range(1 + (index == self._at and self._kind == "duplicate")):
            try:
                await self._front_end.update_weights(request)
            finally:
                if index == self._at + 1:
                    self._overtaken.set()


@pytest.fixture(scope="module", params=["direct", "vLLM's loader"])
def loading_engine(request: pytest.FixtureRequest, shared_engine: VLLMEngine) -> Iterator[VLLMEngine]:
    """Return an engine that loads updates directly, and one whose experts vLLM itself loads every time."""
    if request.param == "direct":
        yield shared_engine
        return
    engine = start("qwen3_moe", tied=False)
    yield engine
    engine.close()


# What the error says, by the bucket at fault: for one that vanishes, the next one shows it, or the end of the update.
WORDS = {
    "drop": "bucket {next} of the weights arrived where bucket {at} was expected",
    "delay": "bucket {next} of the weights arrived where bucket {at} was expected",
    "duplicate": r"bucket {at} of the weights arrived where bucket \d+ was expected",  # the next may come first
    "reorder": "bucket {next} of the weights arrived where bucket {at} was expected",
    "truncate": r"bucket {at} of the weights has \d+ bytes in \S+, not \d+",
    "bit flip": "bucket {at} of the weights was corrupted in transit: its digest is",
}
MISSING = "policy version 2 was not loaded: .*{at} of {count} buckets of weights have arrived"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_between_rank_and_engine_is_detected_and_named_before_a_token_is_sampled(
    loading_engine: VLLMEngine, fault: Fault
):
    engine, family = loading_engine, loading_engine._model.config.model_type
    transport, errors = VLLMTransport(engine, family), []
    count, at = transport.count, fault.index(transport.count)
    assert count >= 3
    assert (why_not_direct(engine) == "") == (family == "qwen2")
    deliveries = [partial(lambda index: transport.deliver(transport.export(index)), i) for i in range(count)]
    way = FaultyWay(engine._engine, fault, count)
    damage = {"truncate": cut, "bit flip": flip}.get(fault.kind)
    with damaged(at, damage) if damage else nullcontext(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._sender, "_front_end", way)
        for number, step in enumerate([*deliveries, transport.publish]):
            try:
                step()
            except EngineError as error:
                errors.append(str(error))
            else:
                assert not errors, "the engine went on"
                assert number <= at + 2, "a bucket was written over one that was not loaded"
            with pytest.raises(EngineError):
                transport.sampled_versions()
    vanishes = fault.kind in {"drop", "delay"} and at == count - 1
    at -= fault.kind == "reorder" and fault.place == "last"
    words = (MISSING if vanishes else WORDS[fault.kind]).format(at=at, next=at + 1, count=count)
    assert re.search(words, errors[0]), errors[0]
    assert vanishes or re.match(rf"role rollout: bucket \d+ of {count} of policy version 2 was not loaded", errors[0])
    if fault.kind == "delay":
        with pytest.raises(EngineError):
            engine._control(engine._engine.update_weights(way.late), "load a bucket that is late")
    for refused in (deliveries[0], transport.publish, transport.sampled_versions):
        with pytest.raises(EngineError):
            refused()


def test_a_buffer_that_is_gone_is_named(shared_engine: VLLMEngine):
    transport = VLLMTransport(shared_engine)
    transport.deliver(transport.export(0))
    with damaged(1, lambda note: replace(note, path="/proc/self/fd/99999")):
        transport.deliver(transport.export(1))
    transport.deliver(transport.export(2))
    with pytest.raises(EngineError, match=r"bucket 1 of the weights can't be read from .*No such file"):
        transport.deliver(transport.export(3))
    with pytest.raises(EngineError):
        transport.sampled_versions()


def test_the_engine_itself_refuses_what_follows_a_bucket_that_failed_until_the_update_begins_again(
    shared_engine: VLLMEngine,
):
    built = policy("qwen2", tied=False, seed=31)
    stream = WeightStream(built, torch.float32, bucket_bytes=BUCKET_BYTES)
    buckets = list(stream)
    shared_engine.check_weights(stream.layout)
    with damaged(1, cut):
        shared_engine.load_bucket(buckets[0])
        shared_engine.load_bucket(buckets[1])
        with pytest.raises(BucketError, match=r"has \d+ bytes") as caught:
            shared_engine.finish_update()
    assert caught.value.index == 1
    with pytest.raises(EngineError, match="call check_weights to begin again"):
        shared_engine.load_bucket(buckets[1])
    with pytest.raises(EngineError, match="no bucket of weights arrived"):
        shared_engine.finish_update()
    send(shared_engine, built)
    assert gap(shared_engine, built) <= 1e-4


@pytest.mark.parametrize("count", [1, 3])
def test_an_update_that_stopped_halfway_leaves_nothing_in_the_next_one(shared_engine: VLLMEngine, count: int):
    older, newer = (policy("qwen2", tied=False, seed=seed) for seed in (32, 33))
    stream = WeightStream(older, torch.float32, bucket_bytes=BUCKET_BYTES)
    shared_engine.check_weights(stream.layout)
    for index in range(count):
        shared_engine.load_bucket(stream.gather(index))
    send(shared_engine, newer)
    assert gap(shared_engine, newer) <= 1e-4


def test_a_first_bucket_without_room_leaves_nothing_open(shared_engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch):
    built = policy("qwen2", tied=False, seed=34)
    stream = WeightStream(built, torch.float32, bucket_bytes=BUCKET_BYTES)
    shared_engine.check_weights(stream.layout)
    with monkeypatch.context() as patch:
        patch.setattr(shared_engine._sender.buffers, "write", raiser(torch.OutOfMemoryError("no room")))
        with pytest.raises(torch.OutOfMemoryError):
            shared_engine.load_bucket(stream.gather(0))
    with pytest.raises(EngineError, match="no bucket of weights arrived"):
        shared_engine.finish_update()
    send(shared_engine, built)
    assert gap(shared_engine, built) <= 1e-4


def raiser(error: Exception) -> Callable[..., Any]:
    """Return a function that raises `error`."""

    def function(*arguments: object, **options: object) -> None:
        raise error

    return function


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


def test_an_engine_that_cant_read_a_gpus_memory_says_so_and_takes_shared_memory(
    shared_engine: VLLMEngine, caplog: pytest.LogCaptureFixture
):
    # A handle with the types of CUDA's; dictionaries, lists and bytes have to pass through vLLM's messages.
    handle = [0, b"\x00\xff" * 32, 8192, 512, False, b"/torch_1", 3, b"\x01" * 64, True]
    sharing = CUDA_IPC._replace(
        id_of=lambda device: "GPU-1",
        export=lambda buffer: handle,
        synchronize=lambda device: None,
        collect=lambda: None,
    )
    shared_engine._sender.open(DeviceBuffers([torch.device("cpu")], sharing))
    assert "CUDA IPC failed" in caplog.text
    assert "EngineError: bucket 0 of the weights is on a GPU, but the engine runs on cpu" in caplog.text
    built = policy("qwen2", tied=False, seed=35)
    send(shared_engine, built)
    assert gap(shared_engine, built) <= 1e-4


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
    aliases, engine._aliases = engine._aliases, {}
    assert aliases == {"model.embed_tokens.weight": ["lm_head.weight"]}
    try:
        send(engine, built)
        assert gap(engine, built) > 1e-2
        assert why_not_direct(engine) == "lm_head.weight got no weight"
        engine._aliases = aliases
        for seed in (5, 6):
            perturb(built, seed, 0.05)
            send(engine, built)
            assert gap(engine, built) <= 1e-4
        engine._aliases = {}
        with pytest.raises(EngineError, match=r"1 weights of the update are missing, the first is lm_head\.weight"):
            send(engine, built)
        engine._aliases = aliases
        send(engine, built)
        assert gap(engine, built) <= 1e-4
    finally:
        engine.close()
