"""Tokenized prompts: a dataset encoded once, and batches of its rows."""

import hashlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.data.examples import (
    Example,
    PromptDataset,
    check_length,
    column_names,
    fewest_tokens,
    nothing_left_error,
    overlong_error,
)
from rlpack.data.tokenization import longest_token, tokenize_demonstrations, tokenize_prompts, tokenizer_hash
from rlpack.data.turn_end import turn_end_id, turn_start_ids

logger = logging.getLogger(__name__)

# Prompts that are encoded at a time. A tokenizer's result takes 60 kB per prompt of 250 tokens, their ids 2 kB.
_CHUNK_PROMPTS = 1000
# Encoding this many prompts takes seconds or, for long ones, a minute.
_NOTED_PROMPTS = 20_000


@dataclass(frozen=True)
class Prompts:
    """Examples and the token ids of their prompts.

    Attributes:
        examples: in the order of the dataset, without those that were dropped.
        input_ids: the prompts, int64 [B rows].
        dated_by: the tokenizer's hash and its chat template, if that writes today's date into the prompts; else None.
        turn_end: id of the token with which demonstrations end; None for the tokenizer's end of sequence.
        turn_start: ids with which they begin, after the prompt.
    """

    examples: Sequence[Example]
    input_ids: Ragged
    dated_by: str | None = None
    turn_end: int | None = None
    turn_start: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of all examples and their token ids, by which a resumed run detects different data.

        If the template inserts the date, the tokenizer and the template are hashed instead of the ids.
        """
        return self._rendered if self.dated_by is None else self._digest(self.dated_by.encode())

    def has_fingerprint(self, fingerprint: str) -> bool:
        """Return whether a fingerprint is that of these prompts; earlier versions took that of dated token ids."""
        return fingerprint == self.fingerprint or (self.dated_by is not None and fingerprint == self._rendered)

    @cached_property
    def _rendered(self) -> str:
        return self._digest(*(tensor.numpy().tobytes() for tensor in (self.input_ids.lengths, self.input_ids.values)))

    def _digest(self, *encoding: bytes) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for part in encoding:
            digest.update(part)
        for example in self.examples:
            digest.update(repr(example).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()

    @cached_property
    def column_names(self) -> list[str]:
        """The dataset's columns except prompt, answer and demonstration, including those that only some rows have."""
        return column_names(self.examples)

    @cached_property
    def _has_answers(self) -> bool:
        return any(example.answer is not None for example in self.examples)

    def batch(self, rows: np.ndarray) -> BatchedDataDict:
        """Return rows as `input_ids`, and as lists `uid`, `prompt`, `answer` and the dataset's other columns.

        `answer` is the answers, or, if no example has one, the dataset's column of that name.
        """
        examples = [self.examples[row] for row in rows]
        lists = {name: [example.columns.get(name) for example in examples] for name in self.column_names}
        own = ("uid", "prompt", "answer") if self._has_answers else ("uid", "prompt")
        lists |= {name: [vars(example)[name] for example in examples] for name in own}
        lists.setdefault("answer", [None] * len(examples))
        return BatchedDataDict({"input_ids": self.input_ids.select(rows), **lists})

    def demonstrations(self, rows: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> BatchedDataDict:
        """Return the given rows with their demonstrations as responses.

        Columns: `input_ids` (prompt and demonstration), `response_mask` (true on the demonstration), `prompt_lengths`
        and `response_lengths`.

        Raises:
            DataError: an example has no demonstration.
        """
        own = tokenize_demonstrations(tokenizer, [self.examples[row] for row in rows], self.turn_end)
        targets = [[*self.turn_start, *target] for target in own]
        selected = self.input_ids.select(rows)
        prompts = [prompt.tolist() for prompt in selected.rows()]
        pairs = list(zip(prompts, targets, strict=True))
        mask = Ragged.from_rows([[False] * len(p) + [True] * len(t) for p, t in pairs], torch.bool)
        return BatchedDataDict(
            {
                "input_ids": Ragged.from_rows([prompt + target for prompt, target in pairs], torch.int64),
                "response_mask": mask,
                "prompt_lengths": selected.lengths,
                "response_lengths": mask.count_nonzero(),
            }
        )


def tokenize_dataset(
    dataset: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: bool,
    max_tokens: int,
    overlong: Literal["error", "drop"],
) -> Prompts:
    """Tokenize a dataset.

    Args:
        dataset: the examples.
        tokenizer: any tokenizer.
        chat_template: render prompts with the tokenizer's chat template.
        max_tokens: maximum length of a prompt.
        overlong: raise for longer prompts, or drop them.

    Raises:
        DataError: a prompt exceeds `max_tokens` and `overlong` is error, or no prompt is left.
    """
    examples, encoded = list[Example](), list[Ragged]()
    longest = longest_token(tokenizer)
    short = [example for example in dataset if fewest_tokens(example, max_tokens, longest) <= max_tokens]
    if overlong == "error" and len(short) < len(dataset):
        for example in dataset:
            check_length(example, dataset.name, max_tokens, longest)
    if len(short) >= _NOTED_PROMPTS:
        logger.info("%s: encoding %d prompts", dataset.name, len(short))
    for start in range(0, len(short), _CHUNK_PROMPTS):
        chunk = short[start : start + _CHUNK_PROMPTS]
        token_ids = tokenize_prompts(tokenizer, chunk, chat_template=chat_template)
        fits = [len(ids) <= max_tokens for ids in token_ids]
        if overlong == "error" and not all(fits):
            row = fits.index(False)
            raise overlong_error(chunk[row], dataset.name, len(token_ids[row]), max_tokens)
        examples += itertools.compress(chunk, fits)
        encoded.append(Ragged.from_rows([*itertools.compress(token_ids, fits)], torch.int64))
    num_dropped = len(dataset) - len(examples)
    if num_dropped:
        logger.warning(
            "%s: dropped %d of %d prompts over %d tokens", dataset.name, num_dropped, len(dataset), max_tokens
        )
    if not examples:
        raise nothing_left_error(dataset.name, max_tokens)
    is_dated = chat_template and "strftime_now" in str(tokenizer.chat_template)
    dated_by = f"{tokenizer_hash(tokenizer)} {tokenizer.chat_template}" if is_dated else None
    end, begin = (turn_end_id(tokenizer), turn_start_ids(tokenizer)) if chat_template else (None, ())
    return Prompts(examples, Ragged.concat(encoded), dated_by, end, begin)
