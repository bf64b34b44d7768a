"""The prompts of a run: both splits, and the tokenizer that reads them."""

import logging
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.dataset_cache import ByteBudget, DatasetCache
from rlpack.batch.fields import FIELDS
from rlpack.batch.store import Store
from rlpack.config.schema import Config
from rlpack.data.datasets import PromptDataset, load_prompts
from rlpack.data.prompts import Prompts, encode_prompts
from rlpack.data.tokenisation import character_tokenizer, characters
from rlpack.models.loading import load_tokenizer

logger = logging.getLogger(__name__)

# Columns that a rollout batch gets on its way; a dataset's own of the same name would stand in their place.
_TAKEN = frozenset(FIELDS)
# Of the store's budget, what the datasets may keep; the rest is for the batches of a step.
_SHARE = 0.25
# Bytes of a block of tokens, which travels whole to each node.
_TOKEN_BLOCK = 2**20


class Split:
    """The prompts of a split, whose tokens and texts lie in a store; batches of them are references."""

    def __init__(
        self, prompts: Prompts, tokenizer: PreTrainedTokenizerBase, store: Store, byte_budget: ByteBudget
    ) -> None:
        self.fingerprint = prompts.fingerprint
        self._num_rows = len(prompts)
        self._prompts = DatasetCache(store, byte_budget, len(prompts), prompts.batch)
        self._demonstrations = DatasetCache(
            store,
            byte_budget,
            len(prompts),
            lambda rows: prompts.demonstrations(rows, tokenizer),
            block_bytes=_TOKEN_BLOCK,
        )

    def __len__(self) -> int:
        return self._num_rows

    def batch(self, rows: np.ndarray) -> BatchedDataDict:
        """Return the columns of `Prompts.batch`."""
        return self._prompts.rows(rows)

    def demonstrations(self, rows: np.ndarray) -> BatchedDataDict:
        """Return the columns of `Prompts.demonstrations`.

        Raises:
            DataError: an example has no demonstration.
        """
        return self._demonstrations.rows(rows)


def in_store(store: Store, tokenizer: PreTrainedTokenizerBase, *splits: Prompts) -> list[Split]:
    """Return the splits with their tokens and texts in the store, of which all together may take a quarter."""
    byte_budget = ByteBudget(_SHARE * store.budget)
    return [Split(split, tokenizer, store, byte_budget) for split in splits]


def load_splits(config: Config) -> tuple[PreTrainedTokenizerBase, Prompts, Prompts]:
    """Return the tokenizer, the training prompts and the held-out prompts.

    Without `model.path` and `model.tokenizer` the tokenizer is made on the spot: one token for each
    character of the data.

    Raises:
        DataError: a source is wrong.
        ModelError: there is no tokenizer at the given place.
    """
    data = config.data
    train = _load(config, data.source, data.split)
    held_out = _load(config, data.validation_source or data.source, data.validation_split)
    if config.model.path is None and config.model.tokenizer is None:
        tokenizer: PreTrainedTokenizerBase = character_tokenizer(characters([*train, *held_out]))
    else:
        tokenizer = load_tokenizer(config.model)
    return tokenizer, _encode(config, train, tokenizer), _encode(config, held_out, tokenizer)


def _load(config: Config, source: str, split: str) -> PromptDataset:
    data = config.data
    dataset = load_prompts(
        source,
        split=split,
        seed=config.seed,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        completion_column=data.completion_column,
        generator=data.generator,
    )
    return _without_taken_columns(dataset)


def _without_taken_columns(dataset: PromptDataset) -> PromptDataset:
    """Leave out the columns that rewards could not be given, because rollouts have columns of these names."""
    taken = sorted({name for example in dataset for name in example.columns if name in _TAKEN})
    if not taken:
        return dataset
    logger.warning(
        "%s: the columns %s are left out, because rollouts have columns of these names; rename those that a reward "
        "function reads",
        dataset.name,
        ", ".join(taken),
    )
    examples = [
        replace(example, columns={name: value for name, value in example.columns.items() if name not in _TAKEN})
        for example in dataset
    ]
    return replace(dataset, examples=examples)


def _encode(config: Config, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    data = config.data
    return encode_prompts(
        dataset,
        tokenizer,
        chat_template=data.chat_template,
        max_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompt,
    )
