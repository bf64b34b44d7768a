"""A sample batch, as a scoring role receives it."""

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.data.tokenization import character_tokenizer, eos_id

_ALPHABET = "0123456789+=abc #é🙂"
_LONGEST = 24


def sample_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, for the texts of `sample_batch`."""
    return character_tokenizer(_ALPHABET)


def sample_batch(num_rows: int = 13, *, seed: int = 0) -> BatchedDataDict:
    """Return rollouts with the columns that a session sends to a scoring role.

    These are `prompt`, `completion`, `answer`, `uid` and `finish_reason` (lists of text), `input_ids` (int64, prompt
    and response) and `response_mask` (bool, true for the response's tokens). Responses have from 0 to 24 characters,
    the first two none and one. Add columns of your dataset: `sample_batch(2).union({"level": [1, 2]})`.

    >>> batch = sample_batch(2)
    >>> batch["completion"], batch["input_ids"].lengths.tolist(), batch["response_mask"].lengths.tolist()
    (['', '5'], [5, 6], [5, 6])

    Args:
        num_rows: number of rows (B).
        seed: seed of the texts.
    """
    generator = np.random.default_rng(seed)
    letters, tokenizer = np.array(list(_ALPHABET)), sample_tokenizer()
    sizes = [0, 1, *generator.integers(2, _LONGEST + 1, max(num_rows - 2, 0)).tolist()][:num_rows]
    sums = generator.integers(0, 10, (num_rows, 2)).tolist()
    prompts = [f"{one}+{other}=" for one, other in sums]
    completions = ["".join(generator.choice(letters, size)) for size in sizes]
    tokens: list[list[int]] = []
    masks: list[list[bool]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        before, after = tokenizer.encode(prompt), tokenizer.encode(completion)
        end = [] if len(after) == _LONGEST else [eos_id(tokenizer) or 0]
        tokens.append([*before, *after, *end])
        masks.append([False] * len(before) + [True] * len([*after, *end]))
    return BatchedDataDict(
        {
            "input_ids": Ragged.from_rows(tokens, torch.int64),
            "response_mask": Ragged.from_rows(masks, torch.bool),
            "prompt": prompts,
            "completion": completions,
            "answer": [str(one + other) for one, other in sums],
            "finish_reason": ["length" if size == _LONGEST else "stop" for size in sizes],
            "uid": [f"row-{row}" for row in range(num_rows)],
        }
    )
