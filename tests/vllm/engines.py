"""Small models in vLLM and in transformers, and weights from one to the other."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Model, Placement, Rollout
from rlpack.config.sections.optimization import Lora
from rlpack.data.tokenization import character_tokenizer, eos_id, pad_id
from rlpack.models.adapters import add_adapters
from rlpack.models.loading import build_causal_lm
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import canary_tokens
from rlpack.rollout.sampling import filtered_logprobs
from rlpack.rollout.types import Generations, SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.end_to_end.commands import Command

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-=# ")
VOCABULARY = len(TOKENIZER)
CANARY = canary_tokens(VOCABULARY)
MAX_LENGTH = 128
TOLERANCE = 1e-4  # nats; both sides compute in fp32
RANK = 4  # of adapters
SETTINGS = [
    SamplingParams(max_new_tokens=24, temperature=temperature, top_p=top_p, top_k=top_k)
    for temperature, top_p, top_k in product((0.0, 0.7, 1.0, 1.3), (1.0, 0.9, 0.5), (0, 1, 7))
]

# Wide weights, so that logits are far apart and every weight shows. vLLM's kernels take heads of 32.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama": {},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_section(family: str, *, tied: bool, **sizes: Any) -> Model:
    return Model(config={"model_type": family, **SIZES, **FAMILIES[family], "tie_word_embeddings": tied} | sizes)


def start(
    family: str,
    *,
    tied: bool,
    seed: int = 0,
    max_length: int = MAX_LENGTH,
    device: str = "cpu",
    placement: Placement | None = None,
    **rollout: Any,
) -> VLLMEngine:
    """Start an engine with a new model."""
    return VLLMEngine.from_settings(
        model_section(family, tied=tied),
        Rollout(**({"engine": "vllm", "kv_cache_gb": 0.05} | rollout)),
        TOKENIZER,
        device=torch.device(device),
        seed=seed,
        max_length=max_length,
        placement=placement,
    )


def causal_lm(family: str, *, tied: bool, seed: int, **sizes: Any) -> PreTrainedModel:
    """Return the model in transformers that an engine with the same seed starts with, if it has the same sizes."""
    return build_causal_lm(
        model_section(family, tied=tied, **sizes),
        vocab_size=VOCABULARY,
        eos_token_id=eos_id(TOKENIZER),
        pad_token_id=pad_id(TOKENIZER),
        seed=seed,
        attention_name="sdpa",
    )


def policy(family: str, *, tied: bool, seed: int = 3) -> Policy:
    """Return a policy of the same shape in transformers, none of whose weights are all 0 or all 1."""
    built = Policy(causal_lm(family, tied=tied, seed=seed))
    perturb(built, seed, 0.03)
    return built


def adapted(family: str, *, tied: bool, seed: int = 3, **settings: object) -> Policy:
    """Return a policy with new adapters whose base weights are those of an engine with the same seed."""
    model = causal_lm(family, tied=tied, seed=seed)
    add_adapters(model, Lora.model_validate({"rank": RANK, "alpha": 8.0} | settings), seed=1)
    return Policy(model)


@torch.no_grad()
def train_adapters(built: Policy, seed: int) -> None:
    """Change all matrices of adapters; B starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in built.named_parameters():
        if "lora_" in name:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)


@torch.no_grad()
def perturb(built: Policy, seed: int, scale: float) -> None:
    """Add a random number to every weight."""
    generator = torch.Generator().manual_seed(seed)
    for weight in built.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator) * scale)


def send(engine: VLLMEngine, built: Policy, *, bucket_bytes: int = 100_000, adapters_only: bool = False) -> None:
    """Give an engine all weights of a policy, adapters merged, or the adapters alone, in several buckets."""
    stream = WeightStream(built, torch.float32, bucket_bytes=bucket_bytes, adapters_only=adapters_only)
    engine.check_weights(stream.layout)
    for bucket in stream:
        engine.load_bucket(bucket)
    engine.finish_update()


@torch.no_grad()
def row_logits(built: Policy, row: Tensor) -> Tensor:
    """Return the logits of one row alone, by transformers, f32 [L, V]."""
    return built.model(input_ids=row[None], use_cache=False).logits[0]


def reference(built: Policy, token_ids: Tensor) -> Tensor:
    """Return log p(token | tokens before it) by transformers, row by row, f32 [R, L]; 0 for first tokens."""
    rows = [row_logits(built, row)[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0] for row in token_ids]
    return torch.nn.functional.pad(torch.stack(rows), (1, 0))


def gap(engine: VLLMEngine, built: Policy) -> float:
    """Return the largest difference between the canary's log-probs of an engine and of transformers."""
    return (engine.logprobs(CANARY) - reference(built, CANARY)).abs().max().item()


def prompts_of(*lengths: int, seed: int = 0) -> Ragged:
    """Return prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    return Ragged.from_rows(rows, torch.int64)


def sampled(
    engine: VLLMEngine, prompts: Ragged, params: SamplingParams, seeds: np.ndarray | None = None
) -> Generations:
    """Return a response for each prompt; by default with seeds 0, 1, ...."""
    return engine.generate(prompts, params, np.arange(prompts.num_rows) if seeds is None else seeds)


def token_gaps(built: Policy, prompts: Ragged, made: Generations, params: SamplingParams) -> Iterator[float]:
    """Yield for each row the largest difference from transformers' log-probs of the sampled tokens."""
    for prompt, tokens, logprobs in zip(prompts.rows(), made.token_ids.rows(), made.logprobs.rows(), strict=True):
        logits = row_logits(built, torch.cat([prompt, tokens]))[len(prompt) - 1 : -1]
        exact = filtered_logprobs(logits, params).gather(1, tokens[:, None])[:, 0]
        yield (exact - logprobs).abs().max().item()


def largest_gap(engine: VLLMEngine, built: Policy) -> float:
    """Return the largest difference of a sampled token's log-prob, over all of `SETTINGS`.

    Rows are longer than the sliding window, and of unlike lengths. Greedy tokens have log-prob 0, which is that of
    candidates without another one; so the token has to have the trainer's largest logit.
    """
    prompts, gaps = prompts_of(1, 5, 17, 40), []
    for params in SETTINGS:
        made = sampled(engine, prompts, params)
        assert made.token_ids.lengths.tolist() == [24] * 4
        assert not params.is_greedy or not made.logprobs.values.any()
        gaps.extend(token_gaps(built, prompts, made, SamplingParams(top_k=1) if params.is_greedy else params))
    return float(np.max(gaps))  # NaN if there is one


def why_not_direct(engine: VLLMEngine) -> str:
    """Return why an engine's updates are not loaded directly, "" if they are."""
    (reason,) = engine._control(engine._engine.collective_rpc("why_not_direct"), "answer")
    return reason


def engine_processes(command: Command) -> list[psutil.Process]:
    """Return the processes in which the engines of a run compute."""
    found = []
    for process in command.processes():
        with suppress(psutil.Error):  # it ended meanwhile
            if "EngineCore" in " ".join(process.cmdline()):
                found.append(process)
    return found
