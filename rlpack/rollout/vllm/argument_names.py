"""The names of vLLM's engine arguments: which a user may set, which rlpack sets, and which have unused results.

The names are read from the installed vLLM's source, because importing vLLM takes seconds.
"""

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.vllm_package import SUPPORTED

CPU_BLOCK_SIZE = 32  # tokens; vLLM's attention on CPUs takes multiples of it
# `gpu_memory_utilization` with a given size of the cache: vLLM only checks that this share of a GPU is free.
SHARE_WITH_GIVEN_CACHE = 0.01

# Arguments that rlpack sets, and the keys to set instead.
OWN_ARGUMENTS: Mapping[str, str] = {
    "model": "model.path",
    "model_weights": "model.path",
    "hf_config_path": "model.path",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "enforce_eager": "rollout.compile",
    "kv_cache_memory_bytes": "rollout.kv_cache_gb",
    "enable_sleep_mode": "rollout.sleep_level",
    "max_lora_rank": "actor.lora.rank",
    **dict.fromkeys(
        (
            *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"),
            "distributed_executor_backend",
        ),
        "placement.pools, where each rank is one engine",
    ),
    **dict.fromkeys(
        (
            *("skip_tokenizer_init", "language_model_only"),
            *("logprobs_mode", "max_logprobs", "runner", "generation_config"),
            *("weight_transfer_config", "worker_extension_cls", "disable_log_stats", "enable_log_requests"),
            *("enable_chunked_prefill", "speculative_config", "spec_method", "spec_model", "spec_tokens", "seed"),
            *("enable_lora", "max_loras", "max_cpu_loras", "lora_target_modules"),
        ),
        "",
    ),
}


# Arguments that a run can't use, and why. vLLM 0.32 returns the experts that it chose through its Model Runner V2,
# which needs a Triton with a backend for the device; the released ones have none for CPUs.
UNUSABLE_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("enable_return_routed_experts", "aux_output_config"),
        "vLLM would return the experts that it chose, which rlpack doesn't read; remove it, and set "
        "actor.moe.replay_routing=true to replay those that the actor chooses for the old log-probs",
    ),
    "watermark_config": "vLLM would choose tokens that its log-probs do not describe; remove it",
}
# Arguments that `rlpack serve` sets, and the options to set instead.
SERVER_OWN_ARGUMENTS: Mapping[str, str] = {
    "model": "the model that comes first",
    "model_weights": "the model that comes first",
    "host": "--host",
    "port": "--port",
    "api_key": "--token-env",
    "dtype": "--dtype",
    "max_model_len": "--max-length",
    "kv_cache_memory_bytes": "--kv-cache-gb",
    **dict.fromkeys(
        (
            *("runner", "middleware", "uds", "root_path", "grpc_port", "skip_tokenizer_init", "tokens_only"),
            *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"),
            *("data_parallel_size", "nnodes", "node_rank", "weight_transfer_config", "worker_extension_cls"),
        ),
        "",
    ),
}
# Types of the arguments that rlpack reads itself, before vLLM could refuse them.
_READ: Mapping[str, type] = {
    **dict.fromkeys(("block_size", "max_num_seqs", "tensor_parallel_size"), int),
    **dict.fromkeys(("enable_prefix_caching", "enforce_eager", "trust_remote_code"), bool),
    **dict.fromkeys(("revision", "tokenizer"), str),
    "gpu_memory_utilization": float,
}
# Classes with the arguments, each an annotated attribute, in the installed vLLM's files. The frontend's file moved in
# 0.33; its newest place comes first.
_ENGINE = (("engine/arg_utils.py",), ("EngineArgs", "AsyncEngineArgs"))
_FRONTEND = (
    ("entrypoints/common/cli_args.py", "entrypoints/launchers/cli_args.py"),
    ("BaseFrontendArgs", "FrontendArgs"),
)


def argument_problems(
    arguments: Mapping[str, Any],
    *,
    on_gpu: bool,
    section: str = "rollout.vllm",
    own: Mapping[str, str] = OWN_ARGUMENTS,
    of_server: bool = False,
    is_installed: bool = True,
) -> Iterator[str]:
    """Yield what is wrong with arguments that a user passes to vLLM.

    Args:
        arguments: by vLLM's names.
        on_gpu: whether the engine runs on a GPU.
        section: where they come from, for messages.
        own: the arguments that rlpack sets, and what to set instead, "" for nothing.
        of_server: allow arguments of vLLM's server, too.
        is_installed: whether vLLM is installed here, so that names that it doesn't have are found, too.
    """
    known = argument_names(of_server=of_server) if arguments and is_installed else frozenset()
    for name in arguments:
        if name in own:
            way_out = f"set {own[name]} instead" if own[name] else "remove it"
            yield f"{section}.{name}: rlpack sets this argument of vLLM itself; {way_out}"
        elif name in UNUSABLE_ARGUMENTS and not of_server:
            yield f"{section}.{name}: {UNUSABLE_ARGUMENTS[name]}"
        elif is_installed and name not in known:
            close = get_close_matches(name, known - own.keys(), n=1)
            hint = f"; did you mean {section}.{close[0]}?" if close else ""
            yield f"{section}.{name} is not an engine argument of the installed vLLM{hint or '; remove it'}"
        elif expected := _expected(f"{section}.{name}", name, arguments[name], on_gpu=on_gpu):
            yield f"{section}.{name} is {_shown(arguments[name])}; it has to be {expected}"


def _expected(key: str, name: str, value: Any, *, on_gpu: bool) -> str | None:
    """Return which values an argument that rlpack reads may have; None if it has one, or if only vLLM reads it."""
    kind, is_count = _READ.get(name), type(value) is int and value > 0
    if name == "block_size" and not on_gpu:
        is_block = is_count and value % CPU_BLOCK_SIZE == 0
        return None if is_block else f"a positive multiple of {CPU_BLOCK_SIZE} on CPUs, such as {2 * CPU_BLOCK_SIZE}"
    if kind is int:
        return None if is_count else "a whole number of at least 1"
    if kind is float:
        is_share = type(value) in (int, float) and 0 < value <= 1
        return None if is_share else "a number above 0 and up to 1"
    if kind is None or value is None or isinstance(value, kind):
        return None
    return "true or false" if kind is bool else f"""a text; quote it twice, as in "{key}='{value}'\""""


def _shown(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def argument_names(*, of_server: bool = False) -> frozenset[str]:
    """Return the names of the installed vLLM's engine arguments, read from its source file.

    Args:
        of_server: add those of its OpenAI-compatible server.

    Raises:
        EngineError: vLLM is not installed, or its source has another form.
    """
    names = _names(*_ENGINE, known="model")
    return names | _names(*_FRONTEND, known="chat_template") if of_server else names


def vllm_folder() -> Path:
    """Return the folder of the installed vLLM.

    Raises:
        EngineError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError("vLLM is not installed")
    return Path(spec.submodule_search_locations[0])


def _names(files: Sequence[str], classes: Sequence[str], *, known: str) -> frozenset[str]:
    """Return the arguments that classes in the first file that exists declare; `known` is one of them."""
    paths = [vllm_folder() / file for file in files]
    path = next((path for path in paths if path.is_file()), paths[0])
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise EngineError(
            f"the arguments of vLLM can't be read from {path}: {reason}; rlpack works with vLLM {SUPPORTED}"
        ) from error
    names = {
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    if known not in names:
        raise EngineError(f"{path} has no class {classes[0]} with its arguments; rlpack works with vLLM {SUPPORTED}")
    return frozenset(name for name in names if not name.startswith("_"))
