"""The names of vLLM's engine arguments: those that a user may set, and those that rlpack sets.

The installed vLLM's source says which there are. Nothing here imports vLLM, which takes seconds.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.vllm_package import SUPPORTED

CPU_BLOCK_SIZE = 32  # tokens; vLLM's attention on CPUs takes multiples of it

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
    **dict.fromkeys(
        (
            *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"),
            "distributed_executor_backend",
        ),
        "placement.pools, where each rank is one engine",
    ),
    **dict.fromkeys(
        (
            *("skip_tokenizer_init", "logprobs_mode", "max_logprobs", "runner", "generation_config"),
            *("weight_transfer_config", "worker_extension_cls", "disable_log_stats", "enable_log_requests"),
            *("enable_chunked_prefill", "enable_lora", "speculative_config", "seed"),
        ),
        "",
    ),
}


def argument_problems(arguments: Mapping[str, Any], *, on_gpu: bool) -> Iterator[str]:
    """Yield what is wrong with `rollout.vllm`; vLLM has to be installed.

    Args:
        arguments: the section.
        on_gpu: whether the engine runs on a GPU.
    """
    known = argument_names() if arguments else frozenset()
    for name in arguments:
        if name in OWN_ARGUMENTS:
            instead = OWN_ARGUMENTS[name]
            way_out = f"set {instead} instead" if instead else "remove it"
            yield f"rollout.vllm.{name}: rlpack sets this argument of vLLM itself; {way_out}"
        elif name not in known:
            close = get_close_matches(name, known - OWN_ARGUMENTS.keys(), n=1)
            hint = f"; did you mean rollout.vllm.{close[0]}?" if close else ""
            yield f"rollout.vllm.{name} is no engine argument of the installed vLLM{hint or '; remove it'}"
    size = arguments.get("block_size")
    if isinstance(size, int) and size % CPU_BLOCK_SIZE and not on_gpu:
        yield f"rollout.vllm.block_size is {size}; vLLM on CPUs takes multiples of {CPU_BLOCK_SIZE}"


def argument_names() -> frozenset[str]:
    """Return the names of the installed vLLM's engine arguments, read from its source file.

    Raises:
        EngineError: vLLM is not installed, or its source has another form.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError("vLLM is not installed")
    path = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise EngineError(f"the engine arguments of vLLM can't be read from {path}: {error}") from error
    names = {
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in {"EngineArgs", "AsyncEngineArgs"}
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    if "model" not in names:
        raise EngineError(f"{path} has no class EngineArgs with its arguments; rlpack works with vLLM {SUPPORTED}")
    return frozenset(name for name in names if not name.startswith("_"))
