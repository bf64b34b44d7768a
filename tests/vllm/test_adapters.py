"""`rollout.lora=adapter` with vLLM itself: its log-probs with an adapter are those of transformers with peft's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import Bucket, pack_bucket
from rlpack.config.sections.optimization import Lora
from rlpack.distributed.context import RankContext
from rlpack.models.adapters import add_adapters
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
    TOKENIZER,
    TOLERANCE,
    causal_lm,
    gap,
    prompts_of,
    reference,
    sampled,
    start,
    token_gaps,
)
from tests.weight_faults import FAULTS, Fault, check_fault, check_no_fault

SEED, RANK = 3, 4


def adapted(family: str, **settings: object) -> Policy:
    """Return a policy with adapters whose base weights are those of an engine with the same seed."""
    model = causal_lm(family, tied=True, seed=SEED)
    add_adapters(model, Lora.model_validate({"rank": RANK, "alpha": 8.0} | settings), seed=1)
    return Policy(model)


@torch.no_grad()
def train(policy: Policy, seed: int) -> None:
    """Change all matrices of adapters; B starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)


def send_adapters(engine: VLLMEngine, policy: Policy) -> None:
    stream = WeightStream(policy, torch.float32, adapters_only=True, bucket_bytes=10_000)
    engine.check_weights(stream.layout)
    assert len(stream.layout) > 1
    for bucket in stream:
        engine.load_bucket(bucket)
    engine.finish_update()


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    started = start("qwen2", tied=True, seed=SEED, lora="adapter", vllm={"max_lora_rank": RANK})
    yield started
    started.close()


def test_each_update_is_used_at_once(engine: VLLMEngine):
    """Prompts are the same throughout: cached keys of an older adapter would show."""
    policy, prompts = adapted("qwen2"), prompts_of(5, 40, 70)
    for version in range(1, 5):
        train(policy, seed=version)
        assert gap(engine, policy) > 0.1  # the update is not there yet
        send_adapters(engine, policy)
        assert gap(engine, policy) < TOLERANCE
        for temperature in (0.7, 1.3):
            params = SamplingParams(max_new_tokens=20, temperature=temperature)
            assert max(token_gaps(policy, prompts, sampled(engine, prompts, params), params)) < TOLERANCE


def test_an_update_that_lacks_a_bucket_is_not_used(engine: VLLMEngine):
    policy = adapted("qwen2")
    stream = WeightStream(policy, torch.float32, adapters_only=True, bucket_bytes=10_000)
    engine.check_weights(stream.layout)
    engine.load_bucket(stream.gather(0))
    with pytest.raises(EngineError, match=r"of 28 matrices of adapters arrived before the update was to end"):
        engine.finish_update()
    send_adapters(engine, policy)
    assert gap(engine, policy) < TOLERANCE


def test_some_layers_can_be_adapted(engine: VLLMEngine):
    policy = adapted("qwen2", targets=("*.q_proj", "*.down_proj"), alpha=20.0)
    train(policy, seed=9)
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
        built = adapted("qwen2")
        train(built, seed=70 + version)
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
        words = (
            r"policy version 2 was not loaded: vLLM could not load an adapter: .*the adapter (can't|in \S+ was changed)"
        )
        with pytest.raises(EngineError, match=words):
            transport.publish()
    with pytest.raises(EngineError, match="no usable weights"):
        transport.sampled_versions()
