"""Rules that involve several keys of generation engines."""

import math
from collections.abc import Iterator

from rlpack.config.recipes import recipe_of, recipe_section
from rlpack.config.roles import gpus_per_rank, started_roles
from rlpack.config.schema import Config
from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.config.sections.optimization import ADAPTER_RANKS

# vLLM refuses requests with a higher temperature (0.32).
MOST_VLLM_TEMPERATURE = 2.0
# Tokens per second and row that a full engine of a large model samples, at least; a row's time in the queue is extra.
_SLOW_ROW_TOKENS_PER_S = 10.0


def engine_problems(config: Config) -> Iterator[str]:
    """Yield problems across the keys of `rollout` that choose and shape the engine."""
    yield from _adapter_problems(config)
    yield from _sleep_problems(config)
    rollout = config.rollout
    unread = {
        "compile": rollout.compile,
        "kv_cache_gb": rollout.kv_cache_gb,
        "sleep_level": rollout.sleep_level,
        "vllm": rollout.vllm or None,
    }
    if rollout.engine == "hf":
        for name, value in unread.items():
            if value is not None:
                removed = " ".join(f"~rollout.vllm.{argument}" for argument in rollout.vllm)
                unset = removed if name == "vllm" else f"rollout.{name}=null"
                yield (
                    f"rollout.{name} is {value}, which rollout.engine=hf doesn't read; set rollout.engine=vllm, or "
                    f"{unset}"
                )
        if rollout.lora == "adapter":
            yield (
                "rollout.lora is adapter, but rollout.engine=hf takes merged weights; set rollout.engine=vllm, or "
                "rollout.lora=merged"
            )
        if rollout.deterministic:
            yield (
                "rollout.deterministic is true, but with rollout.engine=hf rounding depends on the rows that run "
                "together; set rollout.engine=vllm, or rollout.deterministic=false"
            )
        if rollout.dtype == "bf16":
            yield "rollout.dtype is bf16, but rollout.engine=hf generates in fp32; set rollout.engine=vllm"
        return
    if rollout.temperature > MOST_VLLM_TEMPERATURE:
        yield (
            f"rollout.temperature is {rollout.temperature:g}, but vLLM samples at {MOST_VLLM_TEMPERATURE:g} or less; "
            "lower it, or set rollout.engine=hf"
        )
    if (gpus := gpus_per_rank(config, "rollout")) % 1:
        yield (
            f"the pool of the role rollout has gpus_per_rank={gpus:g}, but vLLM takes whole GPUs or none; set it to 1 "
            "or more, or to 0 with cpus_per_rank"
        )


def engine_warnings(config: Config) -> Iterator[str]:
    """Yield a warning if long responses may miss the deadline of a request."""
    rollout = config.rollout
    if rollout.engine != "vllm" or "rollout" not in started_roles(config):
        return
    key, samples = _largest_group(config)
    turns = math.ceil(samples / rollout.max_num_seqs)  # an engine gets whole groups
    needed = turns * rollout.max_new_tokens / rollout.request_timeout_s
    if needed > _SLOW_ROW_TOKENS_PER_S:
        in_turns = f"; {key}={samples} responses take {turns} turns of rollout.max_num_seqs={rollout.max_num_seqs}"
        yield (
            f"rollout.max_new_tokens is {rollout.max_new_tokens} and rollout.request_timeout_s is "
            f"{rollout.request_timeout_s:g}: a response of full length needs {needed:.0f} tokens/s, its time in the "
            f"engine's queue included{in_turns if turns > 1 else ''}, but busy engines may reach only "
            f"{_SLOW_ROW_TOKENS_PER_S:g}. A late response is generated again on a new engine, and ends the run if it "
            "is late each time; raise rollout.request_timeout_s, such as to "
            f"{math.ceil(turns * rollout.max_new_tokens / _SLOW_ROW_TOKENS_PER_S)}"
        )


def _largest_group(config: Config) -> tuple[str, int]:
    """Return the most responses to a prompt, and the key that sets them."""
    if Evaluate in recipe_of(config).sections.values():
        return "evaluate.samples", recipe_section(config, Evaluate).samples
    sizes = {"trainer.group_size": config.trainer.group_size, "evaluation.samples": config.evaluation.samples}
    return max(sizes.items(), key=lambda item: item[1])


def _sleep_problems(config: Config) -> Iterator[str]:
    """Yield problems of `rollout.sleep_level`."""
    level = config.rollout.sleep_level
    if level and config.rollout.engine == "vllm" and gpus_per_rank(config, "rollout") == 0:
        yield (
            f"rollout.sleep_level is {level}, but the role rollout runs on CPUs, where vLLM frees nothing; set it "
            "to null"
        )
    if level == 2 and config.rollout.lora == "adapter":
        yield (
            "rollout.sleep_level is 2, which discards the engine's weights, but rollout.lora=adapter sends only "
            "adapters; set rollout.sleep_level=1, or rollout.lora=merged"
        )


def _adapter_problems(config: Config) -> Iterator[str]:
    """Yield problems of adapters that vLLM has to apply."""
    lora = config.actor.lora
    if lora.rank == 0 and config.rollout.lora == "adapter":
        yield (
            "rollout.lora is adapter, but actor.lora.rank is 0, so there are no adapters; set actor.lora.rank, such as "
            "to 16, or rollout.lora=merged"
        )
    if config.rollout.lora == "adapter" and lora.rank > ADAPTER_RANKS[-1]:
        yield (
            f"actor.lora.rank is {lora.rank}, but vLLM applies adapters up to rank {ADAPTER_RANKS[-1]}; lower it, or "
            "set rollout.lora=merged"
        )
    if (
        config.rollout.lora == "adapter"
        and config.rollout.engine == "vllm"
        and gpus_per_rank(config, "rollout") > 0
        and (config.rollout.dtype or config.actor.precision) == "fp32"
    ):
        yield (
            "rollout.lora is adapter and the engines compute in fp32, but on GPUs vLLM applies adapters in bf16 only; "
            "set rollout.dtype=bf16, actor.precision=bf16, or rollout.lora=merged"
        )
