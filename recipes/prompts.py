"""The prompts of a run: both splits, and the tokenizer that reads them."""

from transformers import PreTrainedTokenizerBase

from rlpack.config.schema import Config
from rlpack.data.datasets import PromptDataset, load_prompts
from rlpack.data.prompts import Prompts, encode_prompts
from rlpack.data.tokenisation import character_tokenizer, characters
from rlpack.models.loading import load_tokenizer


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
    return load_prompts(
        source,
        split=split,
        seed=config.seed,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        demonstration_column=data.demonstration_column,
        generator=data.generator,
    )


def _encode(config: Config, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    data = config.data
    return encode_prompts(
        dataset,
        tokenizer,
        chat_template=data.chat_template,
        max_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompt,
    )
