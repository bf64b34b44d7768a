"""vLLM's engine arguments, for generation in a run and for `rlpack serve`.

The few arguments that every run needs have their own keys in `rollout`, or are derived. All others can be set by
vLLM's own name: `rollout.vllm.<argument>`. `server_arguments` has the options of `rlpack serve`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Literal

import psutil
from transformers import PreTrainedConfig

from rlpack.config.schema import Rollout
from rlpack.models.cached_layers import CachedLayer, cached_layers
from rlpack.models.errors import ModelError
from rlpack.models.text_settings import settings_of
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.argument_names import CPU_BLOCK_SIZE
from rlpack.rollout.vllm.shared_names import BACKEND, EXTENSION

# Head sizes of vLLM's attention kernels for CPUs (0.32); others fail in the kernel.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_BYTES = {"fp32": 4, "bf16": 2}
# Without `rollout.kv_cache_gb`, an engine on a CPU takes at most this share of the memory that is available.
_MEMORY_SHARE = 1 / 8
# vLLM pads vocabularies to a multiple of this.
_VOCABULARY_PADDING = 64
# Tokens of prompts that an engine on a CPU runs at once.
_PREFILL_TOKENS = 4096
# Shortest `max_model_len` of a run: the canary's rows and a token have to fit.
_SHORTEST = 32


@dataclass(frozen=True)
class Shape:
    """The shape of a model's attention, from its config.

    Attributes:
        head_size: size of one head's keys.
        layers: what each layer caches.
        vocab_size: token ids are below it.
    """

    head_size: int
    layers: tuple[CachedLayer, ...]
    vocab_size: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Shape":
        """Return the shape of a causal language model.

        Raises:
            ModelError: the model has no attention heads.
        """
        text, values = config.get_text_config(), settings_of(config)
        heads, hidden, layers = (
            values.get(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        if not (isinstance(heads, int) and heads and hidden and layers):
            raise ModelError(
                f"rollout.engine=vllm: a {text.model_type} model has no attention heads, from which the size of vLLM's "
                "cache is derived; set rollout.engine=hf"
            )
        return cls(
            head_size=int(values.get("head_dim") or hidden // heads),
            layers=cached_layers(values),
            vocab_size=int(text.vocab_size),
        )

    def cache_bytes(self, tokens: int, dtype: str, gpus: int = 0) -> int:
        """Return the largest size of the cache of some tokens, in bytes, on all GPUs of an engine together.

        Layers with a window count like others: vLLM's window grows by the tokens of a batch, mostly more than a row.
        """
        return sum(layer.numbers_per_token(gpus) for layer in self.layers) * tokens * _BYTES[dtype]

    def least_bytes(self, tokens: int, dtype: str, gpus: int = 0) -> int:
        """Return the size that the cache of a row of some tokens certainly has; other arguments are as above."""
        certain = (layer for layer in self.layers if layer.is_certain)
        kept = sum(layer.numbers_per_token(gpus) * min(tokens, layer.window or tokens) for layer in certain)
        return kept * _BYTES[dtype]


def shape_problem(
    shape: Shape,
    *,
    on_gpu: bool,
    way_out: str = "set rollout.engine=hf, or change model.config.num_attention_heads of a new model",
) -> str | None:
    """Return why vLLM can't run attention of this shape on a device; None if it can."""
    if on_gpu or shape.head_size in CPU_HEAD_SIZES:
        return None
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    return f"the model's heads have {shape.head_size} numbers, and vLLM's kernels for CPUs take {sizes}; {way_out}"


def split_problem(config: PreTrainedConfig, gpus: int) -> str | None:
    """Return why vLLM can't split a model over this many GPUs; None if it can, as far as the config shows."""
    settings = settings_of(config)
    vocabulary = settings.get("vocab_size")
    # A mixture of experts may have no dense layers.
    inner = "moe_intermediate_size" if settings.get("moe_intermediate_size") else "intermediate_size"
    sizes = {
        "num_attention_heads": settings.get("num_attention_heads"),
        inner: settings.get(inner),
        f"vocab_size, rounded up to a multiple of {_VOCABULARY_PADDING},": (
            -(-vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING if isinstance(vocabulary, int) else None
        ),
    }
    for name, size in sizes.items():
        if isinstance(size, int) and size % gpus:
            return f"the model's {name} is {size}, which {gpus} GPUs don't divide"
    heads = settings.get("num_key_value_heads")
    # With fewer heads than GPUs, several GPUs hold the same head.
    if isinstance(heads, int) and heads > 0 and heads % gpus and gpus % heads:
        return f"the model's num_key_value_heads is {heads}, which {gpus} GPUs neither divide nor are a multiple of"
    return None


def length_limit(config: PreTrainedConfig) -> int | None:
    """Return the longest row that vLLM takes of a model, prompt and response together, in tokens.

    Runs and `rlpack serve` have the same limit: `max_position_embeddings`, times the factor of a RoPE type that
    stretches it; None if the config has none.
    """
    settings = settings_of(config)
    positions = settings.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        return None
    rope = settings.get("rope_parameters") or {}
    per_layer = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    stretched = [entry for entry in per_layer if entry.get("rope_type") in {"linear", "dynamic"}]
    # Gemma 3's positions are those after scaling.
    factors = [] if "gemma3" in config.model_type else [float(entry.get("factor") or 1.0) for entry in stretched]
    return int(positions * max(factors, default=1.0))


def engine_length(longest_row: int) -> int:
    """Return the `max_model_len` of an engine whose longest row, prompt and response together, is given, in tokens."""
    return max(longest_row, _SHORTEST)


def default_dtype(config: PreTrainedConfig) -> Literal["fp32", "bf16"]:
    """Return the dtype to run a model in: that of its saved weights, or bf16 for other 16-bit dtypes."""
    saved = str(config.to_dict().get("dtype") or "float32")
    return "fp32" if saved.endswith("float32") else "bf16"


@dataclass(frozen=True)
class Capacity:
    """The capacity of an engine.

    Attributes:
        dtype: `fp32` or `bf16`, for weights, keys and values.
        max_length: longest prompt and response together, in tokens.
        max_num_seqs: rows that run at once.
        gpus: 0 for a CPU.
        compile: whether the model is compiled; None compiles it on GPUs only.
        kv_cache_gb: size of the cache of keys and values; None to derive it.
        block_size: tokens of a block of the cache.
    """

    dtype: str
    max_length: int
    max_num_seqs: int
    gpus: int
    compile: bool | None = None
    kv_cache_gb: float | None = None
    block_size: int = CPU_BLOCK_SIZE

    @property
    def given_cache_bytes(self) -> int | None:
        """The size of the cache on all GPUs of the engine together, or in host memory, in bytes; None to derive it."""
        return None if self.kv_cache_gb is None else round(self.kv_cache_gb * 1e9)


def base_arguments(shape: Shape, capacity: Capacity, *, model: str) -> dict[str, Any]:
    """Return the engine arguments of every vLLM that rlpack starts.

    Args:
        shape: attention shape of the model.
        capacity: capacity of the engine.
        model: folder or hub name.
    """
    gpus, compiled = capacity.gpus, capacity.compile
    arguments: dict[str, Any] = {
        "model": model,
        "runner": "generate",
        "dtype": DTYPES[capacity.dtype],
        "max_model_len": capacity.max_length,
        "max_num_seqs": capacity.max_num_seqs,
        "tensor_parallel_size": max(1, gpus),
        # "uni" runs one additional process, "mp" at least two.
        "distributed_executor_backend": "mp" if gpus > 1 else "uni",
        "enforce_eager": not (compiled if compiled is not None else gpus > 0),
        "seed": 0,
    }
    if gpus == 0:
        arguments["block_size"] = CPU_BLOCK_SIZE
        # vLLM can't rewind the random numbers of a CPU, as it has to after part of a prompt.
        prefill = max(_PREFILL_TOKENS, capacity.max_length, capacity.max_num_seqs)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": prefill}
    if capacity.given_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = capacity.given_cache_bytes // max(1, gpus)  # vLLM's is of each GPU
    elif gpus == 0:
        row = least_cache_bytes(shape, capacity) // 2
        arguments["kv_cache_memory_bytes"] = max(2 * row, min(capacity.max_num_seqs * row, cache_budget()))
    return arguments


def least_cache_bytes(shape: Shape, capacity: Capacity) -> int:
    """Return the size in bytes of the smallest cache that rlpack starts vLLM with: it holds two of the longest rows."""
    block = capacity.block_size
    blocks = -(-capacity.max_length // block) + 1  # of a row; vLLM keeps one block for itself
    return 2 * shape.cache_bytes(blocks * block, capacity.dtype, capacity.gpus)


def cache_problem(shape: Shape, capacity: Capacity, *, key: str, lower: str) -> str | None:
    """Return why a given cache is too small, with the least size that works; None if it isn't, or none is given.

    Args:
        shape: attention shape of the model.
        capacity: capacity of the engine.
        key: key that sets the size of the cache, for the message.
        lower: keys that shorten rows, for the message.
    """
    given, least = capacity.given_cache_bytes, least_cache_bytes(shape, capacity)
    if given is None or given >= least:
        return None
    return (
        f"{key} is {capacity.kv_cache_gb:g}, but the cache has to hold the keys and values of two rows of "
        f"{capacity.max_length} tokens in {capacity.dtype}; set it to at least {_in_gb(least)}, or lower {lower}"
    )


def _in_gb(size: int) -> str:
    """Return a size in GB, rounded up to three digits."""
    return f"{Context(prec=3, rounding=ROUND_CEILING).divide(Decimal(size), Decimal(10**9)):f}"


def block_size(arguments: Mapping[str, Any]) -> int:
    """Return the tokens of a block of the cache, which a user may set; `argument_problems` reports unusable values."""
    size = arguments.get("block_size")
    return size if isinstance(size, int) and size > 0 else CPU_BLOCK_SIZE


def cache_budget() -> int:
    """Return the memory in bytes that an engine on a CPU takes for its cache by default."""
    return int(psutil.virtual_memory().available * _MEMORY_SHARE)


def run_capacity(settings: Rollout, *, dtype: str, max_length: int, gpus: int) -> Capacity:
    """Return the capacity of an engine of a run; the arguments are those of `engine_arguments`."""
    return Capacity(
        *(dtype, max_length, settings.max_num_seqs, gpus, settings.compile, settings.kv_cache_gb),
        block_size=block_size(settings.vllm),
    )


def run_cache_problem(shape: Shape, capacity: Capacity) -> str | None:
    """Return why `rollout.kv_cache_gb` is too small; None if it isn't."""
    return cache_problem(
        shape, capacity, key="rollout.kv_cache_gb", lower="data.max_prompt_tokens or rollout.max_new_tokens"
    )


def engine_arguments(
    settings: Rollout, shape: Shape, *, model: str, dtype: str, max_length: int, gpus: int
) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.AsyncEngineArgs` for generation in a run.

    Args:
        settings: the `rollout` section; a null `sleep_level` is 0.
        shape: attention shape of the model.
        model: folder or hub name.
        dtype: `fp32` or `bf16`.
        max_length: longest prompt and response together, in tokens.
        gpus: GPUs of the engine; 0 for a CPU.

    Raises:
        EngineError: `rollout.kv_cache_gb` doesn't hold two of the longest rows.
    """
    capacity = run_capacity(settings, dtype=dtype, max_length=max_length, gpus=gpus)
    if problem := run_cache_problem(shape, capacity):
        raise EngineError(problem)
    own: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "language_model_only": True,  # else models that also read images need a tokenizer
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if gpus > 0 and settings.sleep_level:
        own["enable_sleep_mode"] = True
    return base_arguments(shape, capacity, model=model) | own | dict(settings.vllm)
