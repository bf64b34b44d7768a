"""`rollout.lora=adapter` with vLLM itself: its log-probs with an adapter are those of transformers with peft's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import Bucket, pack_bucket
from rlpack.distributed.context import RankContext
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import TOLERANCES
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.runtime_adapters import RuntimeAdapters
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_rollouts
from tests.vllm.engines import (
    CANARY,
    FAMILIES,
    RANK,
    TOKENIZER,
    TOLERANCE,
    adapted,
    gap,
    largest_gap,
    prompts_of,
    reference,
    sampled,
    send,
    start,
    token_gaps,
    train_adapters,
)
from tests.weight_faults import FAULTS, Fault, check_fault, check_no_fault

SEED = 3
# An engine takes 10 s to start; `make test-vllm-long` starts all.
MODELS = [(family, tied) for family in FAMILIES for tied in (True, False)]
if os.environ.get("RLPACK_ADAPTERS") != "all":
    MODELS = [("gemma3_text", False), ("qwen3_moe", True)]


def send_adapters(engine: VLLMEngine, built: Policy) -> None:
    send(engine, built, bucket_bytes=10_000, adapters_only=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    started = start("qwen2", tied=True, seed=SEED, lora="adapter", vllm={"max_lora_rank": RANK})
    yield started
    started.close()


def test_each_update_is_used_at_once(engine: VLLMEngine):
    """Prompts are the same throughout: cached keys of an older adapter would show."""
    policy, prompts = adapted("qwen2", tied=True), prompts_of(5, 40, 70)
    for version in range(1, 5):
        train_adapters(policy, seed=version)
        assert gap(engine, policy) > 0.1  # the update is not there yet
        send_adapters(engine, policy)
        assert gap(engine, policy) < TOLERANCE
        for temperature in (0.7, 1.3):
            params = SamplingParams(max_new_tokens=20, temperature=temperature)
            assert max(token_gaps(policy, prompts, sampled(engine, prompts, params), params)) < TOLERANCE


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_the_log_probs_with_adapters_are_the_trainers(family: str, tied: bool):
    started = start(family, tied=tied, seed=SEED, lora="adapter", vllm={"max_lora_rank": RANK})
    try:
        policy = adapted(family, tied=tied)
        train_adapters(policy, seed=5)
        assert gap(started, policy) > 100 * TOLERANCE
        send_adapters(started, policy)
        assert largest_gap(started, policy) <= TOLERANCE
    finally:
        started.close()


def test_an_update_that_lacks_a_bucket_is_not_used(engine: VLLMEngine):
    policy = adapted("qwen2", tied=True)
    stream = WeightStream(policy, torch.float32, adapters_only=True, bucket_bytes=10_000)
    engine.check_weights(stream.layout)
    engine.load_bucket(stream.gather(0))
    with pytest.raises(EngineError, match=r"of 28 matrices of adapters arrived before the update was to end"):
        engine.finish_update()
    send_adapters(engine, policy)
    assert gap(engine, policy) < TOLERANCE


def test_some_layers_can_be_adapted(engine: VLLMEngine):
    policy = adapted("qwen2", tied=True, targets=("*.q_proj", "*.down_proj"), alpha=20.0)
    train_adapters(policy, seed=9)
    send_adapters(engine, policy)
    assert gap(engine, policy) < TOLERANCE


class AdapterTransport:
    """Buckets of adapters to a `RolloutWorker` with vLLM; version 1 is published, and version 2 on its way."""

    errors = (EngineError,)

    def __init__(self, engine: VLLMEngine) -> None:
        self.worker = RolloutWorker(
            *(RankContext(), engine, TOKENIZER), canary_tolerance=TOLERANCES[torch.float32], adapters_only=True
        )
        self._update_to(1)
        self.worker.check_weights(self._layout)
        for index in range(self.count):
            self.deliver(self.export(index))
        self.publish()
        self._update_to(2)

    def _update_to(self, version: int) -> None:
        built = adapted("qwen2", tied=True)
        train_adapters(built, seed=70 + version)
        stream = WeightStream(built, torch.float32, adapters_only=True, bucket_bytes=10_000)
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
    engine: VLLMEngine, fault: Fault
):
    check_fault(AdapterTransport(engine), fault)


def test_an_update_without_a_fault_is_published(engine: VLLMEngine):
    check_no_fault(AdapterTransport(engine))


def damage(folder: Path, name: str, fault: str) -> None:
    path = folder / name
    data = path.read_bytes()
    if fault == "missing":
        path.unlink()
    else:
        flipped = data[:-1] + bytes([data[-1] ^ 1])  # the lowest bits come first: a large change, or broken JSON
        low = data[:-4] + bytes([data[-4] ^ 1]) + data[-3:]  # which no canary sees
        path.write_bytes({"cut": data[:-1], "bit flip": flipped, "low bit flip": low}[fault])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("fault", ["missing", "cut", "bit flip", "low bit flip"])
def test_a_fault_in_the_files_between_rank_and_engine_is_detected_before_a_token_is_sampled(
    engine: VLLMEngine, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
):
    transport, written = AdapterTransport(engine), RuntimeAdapters._written

    @contextmanager
    def damaged(self: RuntimeAdapters) -> Iterator[tuple[str, str]]:
        with written(self) as (folder, digest):
            damage(Path(folder), name, fault)
            yield folder, digest

    for index in range(transport.count):
        transport.deliver(transport.export(index))
    with monkeypatch.context() as patch:
        patch.setattr(RuntimeAdapters, "_written", damaged)
        words = {"missing": r"can't be read from \S+: .*No such file"}.get(fault, r"in \S+ was corrupted in transit")
        with pytest.raises(EngineError, match=rf"policy version 2 .* could not load an adapter: .*adapter {words}"):
            transport.publish()
    with pytest.raises(EngineError, match="no usable weights"):
        transport.sampled_versions()
