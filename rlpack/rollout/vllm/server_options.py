"""The options of `rlpack serve`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ServerOptions:
    """Options of vLLM's server.

    Attributes:
        host: IP address to listen on.
        port: 0 for any free one.
        max_length: longest prompt and response together, in tokens; None for the longest that fits.
        dtype: dtype of weights, keys and values; None for that of the saved weights.
        kv_cache_gb: size of the cache of keys and values; None to derive it.
        vllm: further arguments by vLLM's names.
        on_gpu: whether the model runs on GPUs.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_length: int | None = None
    dtype: Literal["fp32", "bf16"] | None = None
    kv_cache_gb: float | None = None
    vllm: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: bool = False
