"""vLLM's engine arguments from the `rollout` section.

The few arguments that every run needs have keys of their own in `rollout`, or are derived. All others can be set by
vLLM's own name: `rollout.vllm.<argument>`.
"""

from dataclasses import dataclass
from typing import Any

import psutil
from transformers import PreTrainedConfig

from rlpack.config.schema import Rollout
from rlpack.models.errors import ModelError
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.argument_names import CPU_BLOCK_SIZE
from rlpack.rollout.vllm.shared_names import BACKEND, EXTENSION

# Head sizes of vLLM's attention kernels for CPUs (0.32); others fail in the kernel.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_BYTES = {"fp32": 4, "bf16": 2}
# Without `rollout.kv_cache_gb`, an engine on a CPU takes at most this share of the memory that is available.
_MEMORY_SHARE = 1 / 8
# Tokens of prompts that an engine on a CPU runs at once.
_PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class Shape:
    """What a model's config says about its attention.

    Attributes:
        head_size: numbers of one head's keys.
        kv_heads: heads of keys and values.
        layers: number of layers.
        vocab_size: token ids are below it.
    """

    head_size: int
    kv_heads: int
    layers: int
    vocab_size: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Shape":
        """Return the shape of a causal language model.

        Raises:
            ModelError: the model has no attention heads.
        """
        text = config.get_text_config()
        values = text.to_dict()
        # Some configs have other names for these; GPT-2 calls its heads n_head.
        heads, hidden, layers = (
            values.get(text.attribute_map.get(name, name))
            for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        if not (isinstance(heads, int) and heads and hidden and layers):
            raise ModelError(
                f"rollout.engine=vllm: a {text.model_type} model has no attention heads, from which the size of vLLM's "
                "cache is derived; set rollout.engine=hf"
            )
        return cls(
            head_size=int(values.get("head_dim") or hidden // heads),
            kv_heads=int(values.get("num_key_value_heads") or heads),
            layers=int(layers),
            vocab_size=int(text.vocab_size),
        )

    def cache_bytes(self, tokens: int, dtype: str) -> int:
        """Return the size of the keys and values of some tokens, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_size * tokens * _BYTES[dtype]


def shape_problem(shape: Shape, *, on_gpu: bool) -> str | None:
    """Return why vLLM can't run attention of this shape on a device; None if it can."""
    if on_gpu or shape.head_size in CPU_HEAD_SIZES:
        return None
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    return (
        f"the model's heads have {shape.head_size} numbers, and vLLM's kernels for CPUs take {sizes}; set "
        "rollout.engine=hf, or change model.config.num_attention_heads of a new model"
    )


def engine_arguments(
    settings: Rollout, shape: Shape, *, model: str, dtype: str, max_length: int, gpus: int
) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.AsyncEngineArgs`.

    Args:
        settings: the `rollout` section.
        shape: of the model.
        model: folder or hub name.
        dtype: `fp32` or `bf16`.
        max_length: longest prompt and response together, in tokens.
        gpus: GPUs of the engine; 0 for a CPU.

    Raises:
        EngineError: `rollout.kv_cache_gb` doesn't hold a single row.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "runner": "generate",
        "generation_config": "vllm",
        "dtype": DTYPES[dtype],
        "max_model_len": max_length,
        "max_num_seqs": settings.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION,
        "tensor_parallel_size": max(1, gpus),
        # One more process than the rank, not two.
        "distributed_executor_backend": "mp" if gpus > 1 else "uni",
        "enforce_eager": not (settings.compile if settings.compile is not None else gpus > 0),
        "disable_log_stats": True,
        "seed": 0,
    }
    if gpus == 0:
        arguments["block_size"] = CPU_BLOCK_SIZE
        # vLLM can't rewind the random numbers of a CPU, as it has to after part of a prompt.
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(_PREFILL_TOKENS, max_length)}
    if settings.kv_cache_gb is not None or gpus == 0:
        arguments["kv_cache_memory_bytes"] = _cache_bytes(settings, shape, dtype, max_length)
    return arguments | dict(settings.vllm)


def _cache_bytes(settings: Rollout, shape: Shape, dtype: str, max_length: int) -> int:
    """Return the size of the cache of keys and values, in bytes."""
    block = settings.vllm.get("block_size", CPU_BLOCK_SIZE)
    block = block if isinstance(block, int) and block > 0 else CPU_BLOCK_SIZE  # vLLM itself refuses other values
    row = shape.cache_bytes((-(-max_length // block) + 1) * block, dtype)  # vLLM keeps one block for itself
    if settings.kv_cache_gb is None:
        available = psutil.virtual_memory().available
        return max(2 * row, min(settings.max_num_seqs * row, int(available * _MEMORY_SHARE)))
    size = int(settings.kv_cache_gb * 1e9)
    if size < 2 * row:
        raise EngineError(
            f"rollout.kv_cache_gb is {settings.kv_cache_gb:g}, and the keys and values of a row of {max_length} tokens "
            f"take up to {2 * row / 1e9:.3g}; raise it, or lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    return size
