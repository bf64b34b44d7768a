"""Warn about prompts, demonstrations and rewards that a model's chat template doesn't fit."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlpack.config.schema import Config
from rlpack.data.prompts import Prompts
from rlpack.data.turn_end import turn_start

_HAS_FORMAT = "rlpack.rewards.functions:has_format"
_TAG = re.compile(r"</?\w+>")
_LAST_TOKENS = 16  # of a prompt, where its template may open a section
_OPENED = re.compile(r"<([A-Za-z_]\w*)>\s*$")


def template_warnings(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    """Return warnings about what the chat template doesn't fit.

    Args:
        config: the whole configuration.
        tokenizer: the policy's.
        prompts: of one split.
    """
    if not isinstance(tokenizer.chat_template, str):
        return []
    if not config.data.chat_template:
        return [] if config.model.path is None else _plain_prompts(config, tokenizer, prompts)
    plain = [] if config.model.path is None else _rendered_prompts(config, tokenizer, prompts)
    return [*plain, *_demonstration_starts(config, tokenizer, prompts), *_opened_section(config, tokenizer, prompts)]


def _demonstration_starts(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    """Warn if demonstrations lack what the template writes before an assistant's message."""
    start, texts = turn_start(tokenizer), [example.demonstration for example in prompts.examples]
    given = [text for text in texts if text is not None]
    tags = _TAG.findall(start) or [start.strip()]
    missing = sum(not any(tag in text for tag in tags) for text in given) if start else 0
    if not missing or prompts.turn_start:
        return []
    return [
        f"{missing} of {len(given)} demonstrations lack {start!r}, which the chat template writes before an answer; "
        "supervised steps teach answers without it, as they are in data.completion_column "
        f"({config.data.completion_column}); write it there if responses should begin with it"
    ]


def _opened_section(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    """Warn if the template opens a section that `has_format` expects in the response."""
    (first,) = prompts.input_ids.select(np.array([0])).rows()
    opened = _OPENED.search(str(tokenizer.decode(first[-_LAST_TOKENS:].tolist())))
    named = {"reward.arguments": (config.reward.function, config.reward.arguments)}
    if config.reward.functions:
        functions = config.reward.functions.items()
        named = {f"reward.functions.{name}.arguments": (one.function, one.arguments) for name, one in functions}
    return [
        f"prompts end with <{opened[1]}>, which the chat template writes, so responses don't begin with it, and "
        f"{_HAS_FORMAT} gives them 0; set {key}.is_opened=true"
        for key, (function, arguments) in named.items()
        if opened and function == _HAS_FORMAT and not arguments.get("is_opened") and _first_tag(arguments) == opened[1]
    ]


def _first_tag(arguments: Mapping[str, Any]) -> str:
    """Return the first section that `has_format` expects."""
    tags = arguments.get("tags", "think")
    return tags if isinstance(tags, str) else str(next(iter(tags), ""))


def _plain_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    """Warn if plain-text prompts probably lack the form in which the model was trained."""
    if rendered := _rendered_prompts(config, tokenizer, prompts):
        return rendered
    if not any(isinstance(example.prompt, str) for example in prompts.examples):
        return []
    return [
        "data.chat_template is false, so prompts are used as plain text, but the tokenizer has a chat template; for an "
        "instruct model, set data.chat_template=true, so that prompts have the format that the model was trained on"
    ]


def _rendered_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    """Warn of text with special tokens of the template, which become plain characters."""
    template = str(tokenizer.chat_template)
    texts = [example.prompt for example in prompts.examples if isinstance(example.prompt, str)]
    markers = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    markers = [marker for marker in markers if marker in template]
    rendered = {marker: count for marker in markers if (count := sum(marker in text for text in texts))}
    if not rendered:
        return []
    marker, count = max(rendered.items(), key=lambda item: item[1])
    return [
        f"{count} of {len(texts)} prompts contain {marker!r}, a special token of the chat template, but text in a "
        "dataset is tokenized as plain characters; store the text alone, or a list of chat messages, in "
        f"data.prompt_column ({config.data.prompt_column}), and set data.chat_template=true"
    ]
