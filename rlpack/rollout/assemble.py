"""Put prompts and responses together into the rollout batch that every later role reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged, spans
from rlpack.rollout.engine import Generations
from rlpack.rollout.errors import EngineError


def rollout_batch(
    prompts: Ragged, generations: Generations, *, group_ids: Tensor, uids: Sequence[str], vocab_size: int | None = None
) -> BatchedDataDict:
    """Return the rollout batch: one row a response, its prompt in front.

    Columns: `input_ids` (prompt, then response), `response_mask` (true on sampled tokens, from what was sampled and
    never from token values), `rollout_logprobs` (0 on the prompt), `prompt_lengths`, `group_ids`, `finish_reason`,
    `uid`, `policy_version`. An empty response gives a row whose mask is all false.

    Args:
        prompts: token ids, int64, B rows, as they were given to the engine.
        generations: what the engine returned for them.
        group_ids: rows with the same id are samples of one prompt, int64 [B].
        uids: the prompts' names in their dataset, B.
        vocab_size: token ids have to be below it; None checks for negative ones only.

    Raises:
        EngineError: rows are missing, a token id is outside the vocabulary, or a log-prob is NaN, infinite or above 0.
    """
    responses = generations.token_ids
    counts = (prompts.num_rows, responses.num_rows, group_ids.shape[0], len(uids))
    if len(set(counts)) > 1:
        raise EngineError(f"prompts, responses, group ids and uids have {counts} rows; they have to be as many")
    _check_values(generations, vocab_size)
    lengths = prompts.lengths + responses.lengths
    starts = lengths.cumsum(0) - lengths
    of_prompt, of_response = spans(starts, prompts.lengths), spans(starts + prompts.lengths, responses.lengths)
    total = int(lengths.sum())
    tokens = torch.empty(total, dtype=torch.int64)
    mask = torch.zeros(total, dtype=torch.bool)
    logprobs = torch.zeros(total, dtype=torch.float32)
    tokens[of_prompt], tokens[of_response] = prompts.values, responses.values
    mask[of_response] = True
    logprobs[of_response] = generations.logprobs.values
    return BatchedDataDict(
        {
            "input_ids": Ragged(tokens, lengths),
            "response_mask": Ragged(mask, lengths),
            "rollout_logprobs": Ragged(logprobs, lengths),
            "prompt_lengths": prompts.lengths,
            "group_ids": group_ids,
            "finish_reason": list(generations.finish_reasons),
            "uid": list(uids),
            "policy_version": torch.full_like(lengths, generations.policy_version),
        }
    )


def _check_values(generations: Generations, vocab_size: int | None) -> None:
    """Refuse tokens and log-probs that no model can have given, naming the first row."""
    tokens, logprobs = generations.token_ids, generations.logprobs
    outside = tokens.values < 0
    if vocab_size is not None:
        outside |= tokens.values >= vocab_size
    checks = (
        ("token id", tokens.values, outside, "0 or more" if vocab_size is None else f"from 0 to {vocab_size - 1}"),
        ("log-prob", logprobs.values, ~((logprobs.values <= 0) & logprobs.values.isfinite()), "finite and at most 0"),
    )
    for name, values, is_broken, allowed in checks:
        if is_broken.any():
            where = int(is_broken.nonzero()[0])
            row = int(tokens.segment_ids[where])
            raise EngineError(f"{name} {values[where].item()} in the response of row {row}; it has to be {allowed}")
