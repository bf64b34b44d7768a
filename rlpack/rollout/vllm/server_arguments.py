"""The arguments of vLLM's OpenAI-compatible server, from the options of `rlpack serve`."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from rlpack.models.errors import ModelError
from rlpack.models.rope import frequency_limits
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.argument_names import SHARE_WITH_GIVEN_CACHE
from rlpack.rollout.vllm.arguments import (
    Capacity,
    Shape,
    base_arguments,
    block_size,
    cache_budget,
    cache_problem,
    default_dtype,
    length_limit,
    shape_problem,
)
from rlpack.rollout.vllm.classifier_arguments import classifier_arguments, is_classifier
from rlpack.rollout.vllm.server_options import ServerOptions

# For models whose config doesn't state the longest text that they take.
_UNKNOWN_LENGTH = 2048
_SHORTEST = 32  # tokens
# `max_model_len` with which vLLM chooses the longest text that the model takes and that fits its cache.
_FITTED_BY_VLLM = -1
# Checks the token of every request; vLLM's own check leaves some paths open.
_MIDDLEWARE = "rlpack.rollout.vllm.require_token.RequireToken"
_MAX_NUM_SEQS = 256
# Lists that the server reads as JSON, instead of several words.
_JSON_LISTS = {"allowed-origins", "allowed-methods", "allowed-headers"}


def server_arguments(config: PreTrainedConfig, options: ServerOptions, *, model: str, name: str) -> dict[str, Any]:
    """Return the arguments of vLLM's server, by vLLM's names.

    Args:
        config: config of the model.
        options: options of the command.
        model: folder or hub name.
        name: name of the model in requests.

    Raises:
        EngineError: an option doesn't fit the model, or vLLM can't run it on the device.
    """
    try:
        shape = Shape.of(config)
    except ModelError as error:
        raise EngineError(
            f"{model!r} is a {config.model_type} model without attention heads; rlpack serve runs causal language "
            "models and reward models with attention"
        ) from error
    if problem := shape_problem(shape, on_gpu=options.on_gpu, way_out="serve it on a GPU"):
        raise EngineError(problem)
    of_model = classifier_arguments(config, model=model) if is_classifier(config) else {}
    gpus = options.vllm.get("tensor_parallel_size", 1) if options.on_gpu else 0
    capacity = _capacity(config, shape, options, gpus)
    own: dict[str, Any] = {
        "served_model_name": name,
        "host": options.host,
        "port": options.port,
        "middleware": _MIDDLEWARE,
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
    }
    if gpus and capacity.given_cache_bytes is not None:
        own["gpu_memory_utilization"] = SHARE_WITH_GIVEN_CACHE
    arguments = base_arguments(shape, capacity, model=model) | of_model | own | _merged(of_model, options.vllm)
    if "distributed_executor_backend" not in options.vllm and _num_workers(arguments) > 1:
        arguments["distributed_executor_backend"] = "mp"
    if capacity.given_cache_bytes is not None and "kv_cache_memory_bytes" not in options.vllm:
        arguments["kv_cache_memory_bytes"] = capacity.given_cache_bytes // _num_workers(arguments)
    return arguments


def _num_workers(arguments: Mapping[str, Any]) -> int:
    """Return how many processes run the model; vLLM checks the sizes themselves."""
    sizes = (arguments.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
    return math.prod(size for size in sizes if isinstance(size, int))


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's arguments, with rlpack's entries merged into those that are mappings."""
    parts = {name: value for name, value in own.items() if isinstance(value, Mapping)}
    return {
        name: {**parts[name], **value} if name in parts and isinstance(value, Mapping) else value
        for name, value in given.items()
    }


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as vLLM's command line takes them; None leaves an argument at vLLM's default.

    >>> command_line({"max_model_len": 64, "enforce_eager": True, "enable_lora": False, "allowed_origins": None})
    ['--max-model-len', '64', '--enforce-eager', '--no-enable-lora']
    >>> command_line({"hf_overrides": {"a": 1}, "served_model_name": ["x", "y"], "tokenizer": "-t"})
    ['--hf-overrides', '{"a": 1}', '--served-model-name', 'x', 'y', '--tokenizer=-t']
    >>> command_line({"allowed_origins": ["*"], "lora_modules": [{"name": "a", "path": "/b"}]})
    ['--allowed-origins', '["*"]', '--lora-modules', '{"name": "a", "path": "/b"}']
    """
    return [word for name, value in arguments.items() for word in _words(name.replace("_", "-"), value)]


def _words(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    elif isinstance(value, list) and name not in _JSON_LISTS:
        yield f"--{name}"
        yield from (json.dumps(item) if isinstance(item, dict) else str(item) for item in value)
    elif (text := json.dumps(value) if isinstance(value, dict | list) else str(value)).startswith("-"):
        yield f"--{name}={text}"
    else:
        yield from (f"--{name}", text)


def _capacity(config: PreTrainedConfig, shape: Shape, options: ServerOptions, gpus: int) -> Capacity:
    """Return the lengths and memory that fit the server, after checking the options against the model."""
    given, limit = options.max_length, length_limit(config)
    if given is not None and limit is not None and given > limit and "hf_overrides" not in options.vllm:
        raise EngineError(
            f"--max-length is {given}, but vLLM takes at most {limit} tokens of this {config.model_type} model (its "
            f"max_position_embeddings); lower it to {limit} or less"
        )
    eager = options.vllm.get("enforce_eager")
    capacity = Capacity(
        dtype=options.dtype or default_dtype(config),
        max_length=given or min((limit or _UNKNOWN_LENGTH, *_short_lengths(config))),
        max_num_seqs=options.vllm.get("max_num_seqs", _MAX_NUM_SEQS),
        gpus=gpus,
        compile=None if eager is None else not eager,
        kv_cache_gb=options.kv_cache_gb,
        block_size=block_size(options.vllm),
    )
    if given is None:
        capacity = replace(capacity, max_length=_fitting_length(shape, capacity, limit))
    if problem := cache_problem(shape, capacity, key="--kv-cache-gb", lower="--max-length"):
        raise EngineError(problem)
    return capacity


def _short_lengths(config: PreTrainedConfig) -> Iterator[int]:
    """Yield the lengths up to which a model with `longrope` has the frequencies of short rows.

    If `max_model_len` exceeds this length, vLLM uses the long factors for all rows. Its own default doesn't exceed it.
    """
    yield from (limit for kind, limit in frequency_limits(config) if kind == "longrope")


def _fitting_length(shape: Shape, capacity: Capacity, limit: int | None) -> int:
    """Return the longest row that the model takes and the cache holds twice, in tokens; -1 leaves it to vLLM."""
    if capacity.given_cache_bytes is not None:
        size = capacity.given_cache_bytes
    elif capacity.gpus == 0:
        size = cache_budget()
    else:  # vLLM measures the GPU's memory, and fits the length of a model that states a limit
        return capacity.max_length if limit is None else _FITTED_BY_VLLM
    blocks = size // (2 * shape.cache_bytes(capacity.block_size, capacity.dtype, capacity.gpus)) - 1
    return min(capacity.max_length, max(_SHORTEST, blocks * capacity.block_size))
