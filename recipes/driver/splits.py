"""The prompts of a run: the training and the held-out split, and their tokenizer."""

import itertools
import logging
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.dataset_cache import ByteBudget, DatasetCache
from rlpack.batch.fields import FIELDS
from rlpack.batch.store import Store
from rlpack.config.evaluation_sets import COLUMN, naming, set_configs
from rlpack.config.schema import Config
from rlpack.data.datasets import PromptDataset, SplitUse, load_prompts
from rlpack.data.examples import characters
from rlpack.data.prompts import Prompts, tokenize_dataset
from rlpack.data.sampler import sampled_rows
from rlpack.data.tokenization import character_tokenizer
from rlpack.models.loading import load_tokenizer
from rlpack.startup.dataset_checks import held_out_use, training_use

logger = logging.getLogger(__name__)

# Columns that a rollout batch gets later; a dataset's column of the same name would be mistaken for the later one.
_RESERVED = frozenset(FIELDS) | {COLUMN}
# Share that datasets may occupy of the room for the driver's own batches; the rest is for the batches of a step.
_STORE_SHARE = 0.25
# Bytes of a block of tokens, which is sent to each node as a whole.
_BLOCK_BYTES = 2**20


class Split:
    """One split, whose tokens and texts are in the object store."""

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
            block_bytes=_BLOCK_BYTES,
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


def cache_splits(store: Store, tokenizer: PreTrainedTokenizerBase, *splits: Prompts) -> list[Split]:
    """Return the splits, whose tokens and texts are cached within a quarter of the room for the driver's batches."""
    byte_budget = ByteBudget(_STORE_SHARE * store.offload_limit())
    return [Split(split, tokenizer, store, byte_budget) for split in splits]


def load_splits(config: Config) -> tuple[PreTrainedTokenizerBase, Prompts, Prompts]:
    """Return the tokenizer, the training prompts and the held-out prompts.

    Without `model.path` and `model.tokenizer`, the tokenizer is built from the data: one token per character.

    Raises:
        DataError: a source can't be read.
        ModelError: the tokenizer can't be loaded.
    """
    train = _load(config, config.data.source, config.data.split, training_use(config))
    held_out = _load_validation(config)
    if config.model.path is None and config.model.tokenizer is None:
        sets = _load_sets(config).values()
        examples = itertools.chain(train, held_out, *sets)
        tokenizer: PreTrainedTokenizerBase = character_tokenizer(characters([*examples]))
    else:
        tokenizer = load_tokenizer(config.model)
    train = _fraction_of(config, train)  # the tokenizer has the characters of all prompts, whatever the fraction
    return tokenizer, _encode(config, train, tokenizer), _encode(config, held_out, tokenizer)


def load_sets(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompts]:
    """Return the prompts of `evaluation.sets` by name.

    Raises:
        DataError: a source can't be read.
    """
    encoded = {}
    for name, dataset in _load_sets(config).items():
        with naming(config, name):
            encoded[name] = _encode(config, dataset, tokenizer)
    return encoded


def _load_sets(config: Config) -> dict[str, PromptDataset]:
    """Return the rows of `evaluation.sets` by name, each up to its limit."""
    sets = {}
    for name, of_set in set_configs(config).items():
        limit = config.evaluation.sets[name].limit
        with naming(config, name):
            dataset = _load_validation(of_set)
        if limit is not None and limit < len(dataset):
            rows = sampled_rows(config.seed, len(dataset), limit / len(dataset))
            dataset = replace(dataset, examples=[dataset.examples[row] for row in rows])
        sets[name] = dataset
    return sets


def load_held_out(config: Config) -> tuple[PreTrainedTokenizerBase, Prompts]:
    """Return the tokenizer of `model.path` or `model.tokenizer`, and the held-out prompts.

    Raises:
        DataError: the source can't be read.
        ModelError: the tokenizer can't be loaded.
    """
    tokenizer = load_tokenizer(config.model)
    return tokenizer, _encode(config, _load_validation(config), tokenizer)


def _load_validation(config: Config) -> PromptDataset:
    """Return the held-out rows, which need demonstrations only if the recipe's own steps train on them."""
    data = config.data
    return _load(config, data.held_out[0], data.validation_split, held_out_use(config))


def _load(config: Config, source: str, split: str, use: SplitUse) -> PromptDataset:
    data = config.data
    dataset = load_prompts(
        source,
        split=split,
        seed=config.seed,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        completion_column=data.completion_column,
        generator=data.generator,
        use=use,
    )
    return _drop_reserved_columns(dataset)


def _fraction_of(config: Config, dataset: PromptDataset) -> PromptDataset:
    """Return the share `data.fraction` of a dataset."""
    rows = sampled_rows(config.seed, len(dataset), config.data.fraction)
    return replace(dataset, examples=[dataset.examples[row] for row in rows])


def _drop_reserved_columns(dataset: PromptDataset) -> PromptDataset:
    """Drop the columns whose names are reserved for columns of rollouts, with a warning.

    `Prompts.batch` replaces the columns `prompt` and `answer` by those that `data.prompt_column` and
    `data.answer_column` name. Here they stay, because a resumed run compares all columns.
    """
    names = {name for example in dataset for name in example.columns}
    has_answers = any(example.answer is not None for example in dataset)
    reserved = sorted(names & (_RESERVED | ({"prompt", "answer"} if has_answers else {"prompt"})))
    if not reserved:
        return dataset
    logger.warning(
        "%s: the columns %s are left out, because rollouts have columns of these names; rename those that a reward "
        "function reads",
        dataset.name,
        ", ".join(reserved),
    )
    examples = [
        replace(example, columns={name: value for name, value in example.columns.items() if name not in _RESERVED})
        for example in dataset
    ]
    return replace(dataset, examples=examples)


def _encode(config: Config, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    data = config.data
    return tokenize_dataset(
        dataset,
        tokenizer,
        chat_template=data.chat_template,
        max_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompt,
    )
