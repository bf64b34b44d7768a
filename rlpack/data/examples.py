"""Examples of a dataset, and the checks on their text when they are loaded."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlpack.batch.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]
# Special tokens of a tokenizer that is built from the data: padding, end of sequence, unknown.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
# Maximum number of characters that Unicode normalization merges into one, in any script.
_MERGED_CHARACTERS = 4
# Tokenizing this many characters takes milliseconds and gives the exact number of tokens.
_QUICK_CHARACTERS = 50_000
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Example:
    """One prompt and the other columns of its row.

    Attributes:
        uid: name of the prompt, unique in its dataset.
        prompt: text, or chat messages (`{"role": ..., "content": ...}`) the last of which is not the assistant's.
        answer: reference for rewards, as in the dataset.
        demonstration: target text of supervised steps.
        columns: the other columns, for rewards.
    """

    uid: str
    prompt: Prompt
    answer: Any = None
    demonstration: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptDataset:
    """Examples in the order of their source.

    Attributes:
        name: the source, for messages.
        examples: at least one, with distinct uids.

    Raises:
        DataError: there is no example, or two have the same uid.
    """

    name: str
    examples: Sequence[Example]

    def __post_init__(self) -> None:
        """Check size and uids."""
        if not self.examples:
            raise DataError(f"{self.name} has no rows; a dataset needs at least one prompt")
        first: dict[str, int] = {}
        for row, example in enumerate(self.examples):
            if first.setdefault(example.uid, row) != row:
                raise DataError(
                    f"{self.name}: rows {first[example.uid]} and {row} both have uid {example.uid!r}; "
                    "make them distinct, or drop the uid column"
                )

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Example:
        return self.examples[row]

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)


def prompt_text(example: Example, *, has_template: bool = True) -> str:
    """Return the text of a prompt that no chat template renders.

    Args:
        example: the prompt.
        has_template: whether the tokenizer has a chat template, for the message.

    Raises:
        DataError: it is a list of chat messages.
    """
    if isinstance(example.prompt, str):
        return example.prompt
    what = f"prompt {example.uid!r} is a list of chat messages"
    if has_template:
        raise DataError(f"{what}; set data.chat_template=true")
    raise DataError(
        f"{what}, which need a tokenizer with a chat template; set model=pretrained model.path=… or model.tokenizer=… "
        "to one that has a template, and data.chat_template=true"
    )


def conversation(prompt: Prompt) -> str:
    """Return a prompt as text without a chat template, one line per message.

    >>> print(conversation([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]))
    system: Add.
    user: 1+1
    """
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {_content(message)}" for message in prompt)


def _content(message: Message) -> str:
    """Return a message's text, or its tool calls as JSON if it has only these."""
    content = message.get("content")
    return json.dumps(message.get("tool_calls"), ensure_ascii=False, default=str) if content is None else content


def overlong_error(example: Example, name: str, num_tokens: int, max_tokens: int) -> DataError:
    """Return the error for a prompt of too many tokens in a dataset."""
    return DataError(
        f"{name}: prompt {example.uid!r} has {num_tokens} tokens, which exceeds {max_tokens}; raise "
        "data.max_prompt_tokens or set data.overlong_prompt=drop"
    )


def nothing_left_error(name: str, max_tokens: int) -> DataError:
    """Return the error for a dataset all of whose prompts are dropped."""
    return DataError(f"{name}: every prompt exceeds data.max_prompt_tokens={max_tokens}; raise it")


def overlong_demonstration_error(
    example: Example, num_tokens: int, max_tokens: int, section: str = "batching", cp: str | None = None
) -> DataError:
    """Return the error for a prompt that, with its demonstration, is over the token budget of a section.

    Args:
        example: the prompt.
        num_tokens: tokens of prompt and demonstration together.
        max_tokens: the token budget of a microbatch.
        section: the section with the budget.
        cp: overrides of `actor.parallel.cp` with which it would fit; None if there are none.
    """
    shared = "" if cp is None else f"share it among ranks by {cp}, "
    return DataError(
        f"prompt {example.uid!r} and its demonstration have {num_tokens} tokens, over the {max_tokens} of "
        f"a microbatch; raise {section}.max_tokens, {shared}remove the row, or set batching.overlong=truncate"
    )


def check_demonstration_length(
    example: Example, max_tokens: int, longest_token: int, section: str = "batching"
) -> None:
    """Raise if a demonstration has so many characters that it must exceed `max_tokens` tokens.

    Args:
        example: an example with a demonstration.
        max_tokens: the token budget.
        longest_token: see `check_length`.
        section: the section with the budget, for the message.

    Raises:
        DataError: names the prompt, the demonstration's length and the keys.
    """
    demonstration = replace(example, prompt=example.demonstration or "")
    if (fewest := fewest_tokens(demonstration, max_tokens, longest_token)) > max_tokens:
        raise DataError(
            f"the demonstration of {example.uid!r} has at least {fewest:,} tokens, over the {max_tokens} of a "
            f"microbatch; raise {section}.max_tokens, remove the row, or set batching.overlong=truncate"
        )


def characters(examples: Iterable[Example]) -> str:
    """Return all characters of the prompts, answers and demonstrations, sorted.

    >>> characters([Example("0", "1+1=", answer="2")])
    '+12='
    """
    alphabet: set[str] = set()
    for example in examples:
        prompt = example.prompt if isinstance(example.prompt, str) else "".join(map(_content, example.prompt))
        alphabet.update(prompt, example.demonstration or "", "" if example.answer is None else str(example.answer))
    return "".join(sorted(alphabet))


def column_names(examples: Iterable[Example]) -> list[str]:
    """Return the columns except prompt, answer and demonstration, including those that only some rows have."""
    return list(dict.fromkeys(name for example in examples for name in example.columns))


def check_length(example: Example, name: str, max_tokens: int, longest_token: int) -> None:
    """Raise if a prompt has so many characters that it must exceed `max_tokens` tokens.

    Tokenizing a prompt of several megabytes takes minutes; counting its characters is immediate.

    Args:
        example: the prompt.
        name: name of the dataset, for messages.
        max_tokens: maximum length of a prompt.
        longest_token: number of characters of the vocabulary's longest token.

    Raises:
        DataError: names the prompt, its length and the keys.
    """
    if (fewest := fewest_tokens(example, max_tokens, longest_token)) > max_tokens:
        raise DataError(
            f"{name}: prompt {example.uid!r} has {_num_characters(example):,} characters, at least {fewest:,} tokens, "
            f"which exceeds {max_tokens}; raise data.max_prompt_tokens or set data.overlong_prompt=drop"
        )


def fewest_tokens(example: Example, max_tokens: int, longest_token: int) -> int:
    """Return a lower bound on a prompt's tokens from its characters; 0 if it may have at most `max_tokens`.

    A tokenizer may drop whitespace and merge a few characters into one, so these count less, unless every token is a
    single character. Of a conversation only the last message counts, because a chat template may leave out earlier
    ones.

    >>> fewest_tokens(Example("0", "word " * 100_000), max_tokens=8, longest_token=10)
    10000
    """
    num_characters = _num_characters(example)
    if num_characters <= _QUICK_CHARACTERS:
        return 0
    if longest_token == 1:
        return num_characters
    characters_per_token = longest_token * _MERGED_CHARACTERS
    if num_characters <= max_tokens * characters_per_token:
        return 0
    return len("".join(_last_text(example.prompt).split())) // characters_per_token


def _num_characters(example: Example) -> int:
    return len(_last_text(example.prompt))


def _last_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def check_text(value: Any, what: str, *, allow_blank: bool = False) -> str:
    """Return `value` if it is text that can be tokenized.

    Raises:
        DataError: it is not text, is blank although `allow_blank` is false, or has an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise DataError(f"{what} is {value!r} ({type(value).__name__}); it must be text")
    if not allow_blank and not value.strip():
        raise DataError(f"{what} is blank ({value!r}); remove the row or fill it in")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has an unpaired surrogate, which is not a character; fix the text: {value[:80]!r}"
        ) from error
    return value


def check_prompt(value: Any, what: str) -> Prompt:
    """Return `value` if it is a prompt: text, or chat messages that end before the assistant's.

    Raises:
        DataError: it is neither; the message names the chat message and the problem.
    """
    if not isinstance(value, (list, tuple)):
        if value is None or isinstance(value, (str, bytes)):
            return check_text(value, what)
        raise DataError(f"{what} is {value!r} ({type(value).__name__}); it must be text or a list of chat messages")
    if not value:
        raise DataError(f"{what} is an empty list; it needs at least one chat message")
    messages = [_check_message(message, f"{what}, message {place}") for place, message in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{what} ends with the assistant's message, which the model generates; remove it")
    return messages


def _check_message(message: Any, what: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{what} is {message!r}; it must be an object with role and content")
    if message.get("role") not in ROLES:
        raise DataError(f"{what} has role {message.get('role')!r}; choose one of {', '.join(ROLES)}")
    calls_tools = message["role"] == "assistant" and message.get("tool_calls")
    if message.get("content") is None and not calls_tools:
        raise DataError(
            f"{what}: content is None or missing; give it text, which may be empty; only an assistant's message with "
            "tool_calls needs none"
        )
    if message.get("content") is not None:
        check_text(message["content"], f"{what}: content", allow_blank=True)
    for key, value in message.items():
        if isinstance(value, str):  # a chat template may render any of them
            check_text(value, f"{what}: {key}", allow_blank=True)
    return dict(message)
