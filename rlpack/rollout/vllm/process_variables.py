"""The environment variables of vLLM's processes."""

from rlpack import malloc_settings

# Defaults, which the user's own settings override.
DEFAULT_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TRITON_F32_DEFAULT": "ieee",  # vLLM's attention in fp32 would multiply in TF32, too coarse for the canary
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines share cores; each has its own number of threads
    **malloc_settings.VARIABLES,
}


def process_variables(
    *, num_threads: int, on_gpu: bool, enforce_eager: bool, deterministic: bool = False
) -> dict[str, str]:
    """Return the variables that depend on the engine.

    Args:
        num_threads: number of threads of the model on a CPU.
        on_gpu: whether the engine runs on a GPU.
        enforce_eager: whether the model is not compiled.
        deterministic: whether rounding must not depend on which rows run together.
    """
    variables = {"OMP_NUM_THREADS": str(num_threads)}
    if not on_gpu:  # else vLLM for CPUs puts the model into a third process
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    elif deterministic:  # vLLM's CPU kernels have no such mode; `check_deterministic` tests them
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if enforce_eager:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables
