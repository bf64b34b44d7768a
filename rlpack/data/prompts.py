"""Prompts as token ids: a dataset read once through the tokenizer, and batches of its rows."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.data.examples import Example, PromptDataset
from rlpack.data.tokenisation import tokenize_demonstrations, tokenize_prompts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """Examples and their prompts' token ids.

    Attributes:
        examples: in the order of the dataset, without those that were dropped.
        input_ids: the prompts, int64 [B rows].
    """

    examples: Sequence[Example]
    input_ids: Ragged

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of all examples and their token ids, by which a resumed run knows its data again."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (self.input_ids.lengths, self.input_ids.values):
            digest.update(tensor.numpy().tobytes())
        for example in self.examples:
            digest.update(repr(example).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()

    def batch(self, rows: np.ndarray) -> BatchedDataDict:
        """Return `input_ids`, and as lists `uid`, `prompt`, `answer` and the dataset's other columns of these rows."""
        picked = [self.examples[row] for row in rows]
        lists = {name: [example.columns.get(name) for example in picked] for name in self.examples[0].columns}
        lists |= {name: [vars(example)[name] for example in picked] for name in ("uid", "prompt", "answer")}
        return BatchedDataDict({"input_ids": self.input_ids.select(rows), **lists})

    def demonstrations(self, rows: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> BatchedDataDict:
        """Return `input_ids` (prompt and demonstration), `response_mask` (true on the demonstration), `prompt_lengths`.

        Raises:
            DataError: an example has no demonstration.
        """
        targets = tokenize_demonstrations(tokenizer, [self.examples[row] for row in rows])
        picked = self.input_ids.select(rows)
        prompts = [prompt.tolist() for prompt in picked.rows()]
        pairs = list(zip(prompts, targets, strict=True))
        mask = Ragged.from_rows([[False] * len(p) + [True] * len(t) for p, t in pairs], torch.bool)
        return BatchedDataDict(
            {
                "input_ids": Ragged.from_rows([prompt + target for prompt, target in pairs], torch.int64),
                "response_mask": mask,
                "prompt_lengths": picked.lengths,
                "response_lengths": mask.count_nonzero(),
            }
        )


def encode_prompts(
    dataset: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: bool,
    max_tokens: int,
    overlong: Literal["error", "drop"],
) -> Prompts:
    """Read a whole dataset through the tokenizer; what doesn't fit is said before anything starts.

    Raises:
        DataError: a prompt is over the limit and `overlong` is error, or none is left.
    """
    examples, encoded = [], []
    token_ids = tokenize_prompts(tokenizer, list(dataset), chat_template=chat_template)
    for example, ids in zip(dataset, token_ids, strict=True):
        if len(ids) > max_tokens:
            if overlong == "error":
                raise DataError(
                    f"{dataset.name}: prompt {example.uid!r} has {len(ids)} tokens, over the limit of {max_tokens}; "
                    "raise data.max_prompt_tokens or set data.overlong_prompt=drop"
                )
            continue
        examples.append(example)
        encoded.append(ids)
    num_dropped = len(dataset) - len(examples)
    if num_dropped:
        logger.warning(
            "%s: dropped %d of %d prompts over %d tokens", dataset.name, num_dropped, len(dataset), max_tokens
        )
    if not examples:
        raise DataError(f"{dataset.name}: every prompt is over data.max_prompt_tokens={max_tokens}; raise it")
    return Prompts(examples, Ragged.from_rows(encoded, torch.int64))
