"""vLLM on CUDA: new weights arrive by CUDA IPC, and the engine's log-probs are those of transformers.

With two or four visible GPUs the same tests run an engine that splits its model.
"""

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.errors import BucketError
from rlpack.rollout.vllm.device_buffers import DeviceBuffers
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.rollout.vllm.vllm_package import installation_problem
from rlpack.rollout.vllm.weight_buffers import BucketNote, WeightBuffers
from tests.vllm.engines import gap, policy, send, start

PROBLEM = installation_problem(on_gpu=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The engine takes all GPUs; its model has four heads.
    pytest.mark.skipif(torch.cuda.device_count() not in (1, 2, 4), reason="set CUDA_VISIBLE_DEVICES to 1, 2 or 4 GPUs"),
    pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or ""),
]
# Nats, in fp32, in which attention multiplies, too (TRITON_F32_DEFAULT); other weights are nats away.
CLOSE, FAR = 1e-3, 0.5


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    started = start("qwen2", tied=True, device="cuda")
    yield started
    started.close()


def test_ten_updates_arrive_by_cuda_ipc_and_leave_no_memory_on_the_gpu(engine: VLLMEngine):
    assert isinstance(engine._sender.buffers, DeviceBuffers)
    before = torch.cuda.memory_allocated()
    for seed in range(10):
        built = policy("qwen2", tied=True, seed=seed)
        assert gap(engine, built) > FAR
        send(engine, built)
        assert gap(engine, built) <= CLOSE
        assert torch.cuda.memory_allocated() == before


def test_updates_through_shared_memory_give_the_same_log_probs(engine: VLLMEngine):
    built, on_gpus = policy("qwen2", tied=True, seed=20), engine._sender.buffers
    engine._sender.buffers = WeightBuffers()
    try:
        send(engine, built)
        assert gap(engine, built) <= CLOSE
    finally:
        engine._sender.buffers.close()
        engine._sender.buffers = on_gpus


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="an engine on several GPUs ends with such an update")
def test_a_bucket_that_changes_on_its_way_is_named_and_the_next_update_arrives(engine: VLLMEngine):
    built = policy("qwen2", tied=True, seed=21)
    stream = WeightStream(built, torch.float32, bucket_bytes=100_000)
    write = DeviceBuffers.write

    def damaging(self: DeviceBuffers, weights: Mapping[str, Tensor], index: int) -> BucketNote:
        note = write(self, weights, index)
        if index == 1:
            self._slots[1].buffers[0][64] ^= 1
            torch.cuda.synchronize()
        return note

    def update() -> None:
        for bucket in stream:
            engine.load_bucket(bucket)
        engine.finish_update()

    engine.check_weights(stream.layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceBuffers, "write", damaging)
        with pytest.raises(BucketError, match=r"bucket 1 .* was corrupted in transit"):
            update()
    send(engine, built)
    assert gap(engine, built) <= CLOSE
