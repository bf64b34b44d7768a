"""Render prompts through a tokenizer's chat template, and keep special tokens in their texts apart."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlpack.batch.errors import DataError
from rlpack.data.examples import Example, Message, Prompt
from rlpack.data.tools import tools_of


def messages_of(prompt: Prompt) -> list[Message]:
    """Return a prompt as chat messages; text is one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def render_pieces(
    tokenizer: PreTrainedTokenizerBase, example: Example, where: str, special: re.Pattern[str]
) -> list[str]:
    """Return a prompt as the chat template renders it, with its generation prompt, in pieces.

    Pieces at even positions are the template's and the messages' texts. Those at odd positions are special tokens in
    messages and tools, which are text, too. While the template is rendered, markers take their places.

    Args:
        tokenizer: any tokenizer.
        example: the prompt, and tools in its column `tools`.
        where: names the prompt in errors.
        special: matches any special token.

    Raises:
        DataError: the tokenizer has no template, the template rejects the prompt, or the column has other values than
            tools.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: {tokenizer_name(tokenizer)} has no chat template; set data.chat_template=false, or "
            "model.tokenizer to one that has one"
        )
    messages, tools = messages_of(example.prompt), tools_of(example)
    marker, escaped = _unused_character([*_texts([messages, tools]), str(tokenizer.chat_template)])
    replaced: list[str] = []

    def replace(match: re.Match[str]) -> str:
        replaced.append(match[0])
        return f"{marker}{len(replaced) - 1}{marker}"

    mark = partial(special.sub, replace)
    marked = [{**_map_texts(message, mark), "role": message["role"]} for message in messages]
    rendered = render(tokenizer, marked, where, _map_texts(tools, mark)).replace(escaped, marker)
    pieces = rendered.split(marker)
    return [replaced[int(piece)] if number % 2 else piece for number, piece in enumerate(pieces)]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    where: str,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Return the conversation rendered by the chat template."""
    try:
        options: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        rendered: Any = tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is a program: it may divide by 0, for example, or not even be a string
        reason = str(error) or type(error).__name__
        raise DataError(f"{where}: the chat template of {tokenizer_name(tokenizer)} rejects it: {reason}") from error
    return rendered


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of a tokenizer for messages."""
    return f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r}"


def _unused_character(texts: Sequence[str]) -> tuple[str, str]:
    r"""Return a character of private use that no text has, and how it is escaped, as `\\ue000`.

    A template that renders an object as JSON, or as Python does, may escape it.
    """
    candidates = ((chr(code), f"\\u{code:04x}") for code in range(0xE000, 0xF8FF))
    return next(pair for pair in candidates if not any(form in text for form in pair for text in texts))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a message's field, such as a list of tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a message's field with each of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(name, change): _map_texts(item, change) for name, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list | tuple) else value
