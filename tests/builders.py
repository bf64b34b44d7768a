"""Small real objects that tests of several packages share."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import unpack_bucket
from rlpack.batch.ragged import Ragged
from rlpack.batch.weight_layout import WeightForm
from rlpack.config.recipes import builtin_target, config_class
from rlpack.config.schema import Actor, Algorithm, Config, Model, Optimizer
from rlpack.data.tokenization import character_tokenizer
from rlpack.rollout.assemble import assemble
from rlpack.rollout.types import Generations, TrajectoryBatch
from rlpack.workers.actor import ActorWorker

ALPHABET = "0123456789+-=# "

# Weights ten times as wild as usual, so that logits are far apart and a slip shows.
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(ALPHABET)


def tiny_config(recipe: str = "grpo", **sections: Any) -> Config:
    """Return a whole configuration of a recipe: a new tiny model, unclipped gradients, and `sections` on top."""
    actor = Actor(optimizer=Optimizer(max_grad_norm=1e9), isolation_check=False)
    return config_class(builtin_target(recipe))(
        **({"model": Model(config=MODEL), "actor": actor, "seed": 3} | sections)
    )


def tiny_rollouts(sizes: Sequence[tuple[int, int]], *, group: int = 2, seed: int = 0) -> BatchedDataDict:
    """Return a rollout batch of random tokens; `sizes` are the tokens of prompt and response of each row."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = len(tiny_tokenizer())

    def ragged(lengths: list[int]) -> Ragged:
        values = torch.randint(3, vocabulary, (sum(lengths),), generator=generator)
        return Ragged(values, torch.tensor(lengths, dtype=torch.int64))

    prompts, responses = (ragged([size[part] for size in sizes]) for part in range(2))
    made = Generations(
        token_ids=responses,
        logprobs=responses.with_values(-torch.rand(responses.values.shape, generator=generator)),
        policy_versions=responses.with_values(torch.zeros(responses.values.shape, dtype=torch.int32)),
        finish_reasons=["stop"] * len(sizes),
    )
    ids = torch.arange(len(sizes)) // group
    uids = [f"prompt-{n}" for n in ids.tolist()]
    return assemble(TrajectoryBatch.single_turn(prompts, made), group_ids=ids, uids=uids)


def with_prompts_by_length(batch: BatchedDataDict) -> BatchedDataDict:
    """Return the batch with the same prompt in all rows whose prompts are equally long."""
    tokens = batch["input_ids"]
    values, prompts = tokens.values.clone(), {}
    for start, length in zip(tokens.offsets.tolist(), batch["prompt_lengths"].tolist(), strict=False):
        values[start : start + length] = prompts.setdefault(length, values[start : start + length].clone())
    return batch.drop(["input_ids"]).union({"input_ids": tokens.with_values(values)})


def exported_weights(actor: ActorWorker) -> dict[str, torch.Tensor]:
    """Return all weights of an actor on the rank that exports them, as engines receive them; a collective."""
    form = WeightForm(torch.float32)
    layout = actor.open_weights(form)
    buckets = (actor.export_bucket(index, form, version=1) for index in range(len(layout)))
    return {name: weight for bucket in buckets if bucket for name, weight in unpack_bucket(bucket).items()}


def tiny_algorithm(**values: Any) -> Algorithm:
    """Return the algorithm with a KL term, and a constant for `seq_mean_token_sum_norm`."""
    return Algorithm(**({"kl_coef": 0.2, "kl_estimator": "k3", "aggregation_constant": 9.0} | values))
