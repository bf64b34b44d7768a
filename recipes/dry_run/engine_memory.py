"""The memory of generation on a rank of the role rollout: the engine's weights, and its keys and values.

`hf` has a whole fp32 copy of the policy and, while it generates, the keys and values of the rows that run at once. vLLM
on GPUs takes a share of the device, whatever the model; on CPUs and with `rollout.kv_cache_gb`, weights and a cache of
a given size. vLLM allocates its cache when it starts, and frees it only if it sleeps, which it does on GPUs only.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from rlpack.config.roles import gpus_per_rank, longest_rollout, shares_gpus, sleep_level
from rlpack.config.schema import Config
from rlpack.distributed.errors import in_units
from rlpack.models.errors import ModelError
from rlpack.models.weight_stream import BUCKET_BYTES
from rlpack.rollout.vllm.arguments import Shape, engine_arguments

# Number of buckets of weights that are in flight to an engine at one time.
IN_FLIGHT = 2
# vLLM's own share of a GPU, and rlpack's where the engine shares the GPU with other roles.
_WHOLE_GPU, _SHARED_GPU = 0.92, 0.5
# Models below this size have a second copy of their weights while they generate (`rlpack.rollout.fused_linear`).
_PREPARED_BYTES = 2**30
# A buffer of keys and values has room for this many times its tokens (`rlpack.rollout.kv_cache`).
_ROOM = 1.5
# Parts of the names of vLLM's arguments with which weights or cache may take less of a GPU than is counted here.
_SMALLER = ("offload", "quantization", "cache_dtype", "load_format", "model_loader", "overrides", "additional_config")
_SMALLER += ("context_parallel", "num_gpu_blocks_override", "limit_mm_per_prompt")


@dataclass(frozen=True)
class EngineMemory:
    """The bytes of an engine on each device of a rank.

    Attributes:
        weights: bytes of its weights, which it has at all times unless it sleeps.
        cache: bytes of keys and values, and of other memory for generation.
        host: bytes that it moves to host memory while it sleeps.
        sleeps: whether it frees weights and cache while other roles work.
        keeps_cache: whether an engine that doesn't sleep has its cache at all times, not only while it generates.
        start: bytes of a whole model in host memory next to a GPU, while the engine starts.
        share: bytes that vLLM takes for weights and cache; None without such a limit.
        row: bytes that the cache of the longest row certainly has, without which vLLM doesn't start.
        bucket: bytes of the largest part of the weights that is sent at once.
        received: bytes of the shared memory in which weights reach an engine on a CPU, which keeps it.
    """

    weights: int
    cache: int
    host: int = 0
    sleeps: bool = False
    keeps_cache: bool = False
    start: int = 0
    share: int | None = None
    row: int = 0
    bucket: int = BUCKET_BYTES
    received: int = 0

    @property
    def missing(self) -> int:
        """Return the bytes by which vLLM's share is too small for its weights and a row; 0 if it isn't."""
        return 0 if self.share is None else max(0, self.weights + self.row - self.share)

    def problem(self, pool: str) -> str | None:
        """Return why vLLM doesn't start on the GPUs of a pool; None if its share holds its weights and a row."""
        if self.share is None or not self.missing:
            return None
        return (
            f"vLLM's share of {in_units(self.share)} of a GPU of pool {pool} doesn't hold {in_units(self.weights)} of "
            f"weights and {in_units(self.row)} for the KV cache of the longest row; raise "
            "rollout.vllm.gpu_memory_utilization, or generate in a pool with more gpus_per_rank"
        )

    @property
    def kept(self) -> int:
        """Return the bytes on the device while other roles work."""
        return 0 if self.sleeps else self.weights + self.received + (self.cache if self.keeps_cache else 0)

    @property
    def call(self) -> int:
        """Return the additional bytes on the device while it generates."""
        return self.weights + self.received + self.cache - self.kept


def engine_memory(
    config: Config, model: PreTrainedModel, rows: int, device_bytes: int, gpu_bytes: int | None = None
) -> EngineMemory:
    """Return the memory of the engine of `rollout.engine`.

    Args:
        config: the whole configuration.
        model: the policy, on the meta device.
        rows: largest number of rows that a rank generates for a batch or an evaluation.
        device_bytes: memory of its device that the run may take.
        gpu_bytes: whole memory of the device, of which vLLM takes its share; `device_bytes` by default.
    """
    numbers = sum(weight.numel() for weight in model.parameters())
    longest, gpus = longest_rollout(config), int(gpus_per_rank(config, "rollout"))
    running = min(rows, config.rollout.max_num_seqs)
    if config.rollout.engine == "hf":
        weights = 4 * numbers
        prepared = weights if not gpus and weights < _PREPARED_BYTES else 0
        cache = 0
        with suppress(ModelError):  # states of recurrent models don't grow with the row
            cache = _buffered_bytes(config, model, running)
        return EngineMemory(weights, cache + prepared, start=weights if gpus else 0, bucket=_bucket_bytes(model, 4))
    shape = Shape.of(model.config)
    dtype = config.rollout.dtype or config.actor.precision
    weights = numbers * (2 if dtype == "bf16" else 4) // max(1, gpus)
    settings = config.rollout
    arguments = engine_arguments(settings, shape, model="", dtype=dtype, max_length=longest, gpus=gpus)
    asleep = sleep_level(config)
    kept: dict[str, Any] = {"host": weights if asleep == 1 else 0, "sleeps": asleep > 0, "keeps_cache": asleep == 0}
    kept["bucket"] = _bucket_bytes(model, 2 if dtype == "bf16" else 4)
    if not gpus and config.rollout.lora == "merged":  # see `rlpack.rollout.vllm.weight_buffers`
        kept["received"] = min(weights, IN_FLIGHT * kept["bucket"])
    if gpus and config.model.path is None:  # a new model is built whole, and written for vLLM to read
        kept["start"] = 4 * numbers
    if "kv_cache_memory_bytes" in arguments:
        return EngineMemory(weights, int(arguments["kv_cache_memory_bytes"]), **kept)
    if not any(part in name for name in settings.vllm for part in _SMALLER):
        whole = device_bytes if gpu_bytes is None else gpu_bytes
        kept |= {
            "share": int(gpu_share(config) * whole),
            "row": shape.least_bytes(longest, dtype, gpus) // max(1, gpus),
        }
    # vLLM's default share of 0.92 is more than a limit of 90 % of a GPU: its cache counts as a share of the limit.
    return EngineMemory(weights, max(0, int(gpu_share(config) * device_bytes) - weights), **kept)


def _bucket_bytes(model: PreTrainedModel, itemsize: int) -> int:
    """Return the size of the largest bucket of a model's weights, in bytes: a larger tensor is a bucket by itself."""
    return max(BUCKET_BYTES, itemsize * max((weight.numel() for weight in model.parameters()), default=0))


def _buffered_bytes(config: Config, model: PreTrainedModel, rows: int) -> int:
    """Return the size of the keys and values of rows of the greatest length in `hf`, in bytes.

    A layer with a window holds a whole prompt before it drops the tokens before the window.

    Raises:
        ModelError: the model has no attention heads.
    """
    longest, prompt = longest_rollout(config), config.data.max_prompt_tokens
    numbers = 0
    for layer in Shape.of(model.config).layers:
        tokens = longest if layer.window is None else min(longest, max(layer.window, prompt))
        numbers += tokens * layer.numbers_per_token(0)
    return int(_ROOM * rows * numbers * 4)


def gpu_share(config: Config) -> float:
    """Return the share of a GPU that vLLM takes without `rollout.kv_cache_gb`."""
    default = _SHARED_GPU if shares_gpus(config) else _WHOLE_GPU
    return config.rollout.vllm.get("gpu_memory_utilization", default)
