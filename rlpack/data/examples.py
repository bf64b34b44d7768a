"""Examples of a dataset, and the checks on their text when they are loaded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpack.batch.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]
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
            raise DataError(f"{self.name} has no rows; data.source needs at least one prompt")
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
    check_text(message.get("content"), f"{what}: content", allow_blank=True)
    for key, value in message.items():
        if isinstance(value, str):  # a chat template may render any of them
            check_text(value, f"{what}: {key}", allow_blank=True)
    return dict(message)
