"""Prompts as every source gives them: checked once, when they are loaded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpack.batch.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Example:
    """One prompt and what is known about it.

    Attributes:
        uid: names the prompt; no other of its dataset has it.
        prompt: text, or chat messages (`{"role": ..., "content": ...}`) of which the last is not the assistant's.
        answer: what rewards compare with, as the dataset has it.
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
        examples: at least one, their uids distinct.

    Raises:
        DataError: there is no example, or a uid comes twice.
    """

    name: str
    examples: Sequence[Example]

    def __post_init__(self) -> None:
        """Check size and uids."""
        if not self.examples:
            raise DataError(f"{self.name} has no rows; give a source with at least one prompt")
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


def check_text(value: Any, what: str, *, blank: bool = False) -> str:
    """Return `value` if it is text that can be tokenised.

    Raises:
        DataError: it is no text, blank where it may not be, or has half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise DataError(f"{what} is {value!r} ({type(value).__name__}); it has to be text")
    if not blank and not value.strip():
        raise DataError(f"{what} is blank ({value!r}); remove the row or fill it in")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has half of a surrogate pair, which is no character; repair the text: {value[:80]!r}"
        ) from error
    return value


def check_prompt(value: Any, what: str) -> Prompt:
    """Return `value` if it is a prompt: text, or chat messages that wait for an answer.

    Raises:
        DataError: it is neither; the text names the message and what is wrong with it.
    """
    if not isinstance(value, (list, tuple)):
        if value is None or isinstance(value, (str, bytes)):
            return check_text(value, what)
        raise DataError(f"{what} is {value!r} ({type(value).__name__}); it has to be text or a list of chat messages")
    if not value:
        raise DataError(f"{what} is an empty list; give at least one chat message")
    messages = [_check_message(message, f"{what}, message {place}") for place, message in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{what} ends with the assistant's message; the model is to write that one, so leave it out")
    return messages


def _check_message(message: Any, what: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{what} is {message!r}; it has to be an object with role and content")
    if message.get("role") not in ROLES:
        raise DataError(f"{what} has role {message.get('role')!r}; choose one of {', '.join(ROLES)}")
    check_text(message.get("content"), f"{what}: content", blank=True)
    for key, value in message.items():
        if isinstance(value, str):  # a chat template may write any of them
            check_text(value, f"{what}: {key}", blank=True)
    return dict(message)
