"""Text to token ids: a tokenizer with one token a character, and prompts through any tokenizer.

What a user wrote is never read as a special token: `<eos>` inside a prompt is five characters.
"""

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlpack.batch.errors import DataError
from rlpack.data.examples import Example, Message

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    r"""Return a tokenizer with one token for each character of `alphabet`, after `<pad>`, `<eos>` and `<unk>`.

    It saves and loads as every tokenizer of transformers does.

    >>> tokenizer = character_tokenizer("ab\n")
    >>> tokenizer.encode("ba\n"), tokenizer.decode([4, 3, 5]), tokenizer.eos_token_id
    ([4, 3, 5], 'ba\n', 1)

    Raises:
        DataError: the alphabet is empty or names a character twice.
    """
    twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if not alphabet or twice:
        raise DataError(f"the alphabet {alphabet!r} has to name every character once; it repeats {twice}")
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *alphabet))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def characters(examples: Iterable[Example]) -> str:
    """Return every character of the prompts, answers and demonstrations, sorted: an alphabet that can write them.

    >>> characters([Example("0", "1+1=", answer="2")])
    '+12='
    """
    found: set[str] = set()
    for example in examples:
        prompt = example.prompt if isinstance(example.prompt, str) else "".join(m["content"] for m in example.prompt)
        found.update(prompt, example.demonstration or "", "" if example.answer is None else str(example.answer))
    return "".join(sorted(found))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, example: Example, *, chat_template: bool) -> list[int]:
    """Return the token ids that the model goes on from.

    Args:
        tokenizer: any tokenizer; what it puts before a text (a begin-of-sequence token) is put, what it puts after
            is not.
        example: a prompt of text, or of chat messages.
        chat_template: render the prompt through the tokenizer's chat template, text as one message of the user.

    Raises:
        DataError: messages without a chat template, a character that the tokenizer can't write, or no token at all.
    """
    where = f"prompt {example.uid!r}"
    if chat_template:
        messages = example.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = _encode_messages(tokenizer, messages, where)
    elif isinstance(example.prompt, str):
        ids = _encode_text(tokenizer, example.prompt, where, add_special_tokens=True)
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
    else:
        raise DataError(f"{where} is a list of chat messages; set data.chat_template=true")
    if not ids:
        raise DataError(f"{where} has no token: {example.prompt!r}; a model needs one to go on from")
    return ids


def encode_demonstration(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[int]:
    """Return the token ids of the demonstration, which end with the end-of-sequence token.

    Raises:
        DataError: the example has no demonstration, the tokenizer no end of sequence, or a character is unknown.
    """
    where = f"demonstration of {example.uid!r}"
    if example.demonstration is None:
        raise DataError(f"{where} is missing; supervised steps need data.completion_column")
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise DataError(
            f"{tokenizer_name(tokenizer)} has no end-of-sequence token (eos_token), which demonstrations end with; set "
            "model.tokenizer to one that has it"
        )
    return [*_encode_text(tokenizer, example.demonstration, where, add_special_tokens=False), end]


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the end-of-sequence token, None where the tokenizer has none."""
    return _single_id(tokenizer.eos_token_id, "end-of-sequence")


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return what slots without a token hold: the padding token, or 0; no real token ever sees it."""
    return _single_id(tokenizer.pad_token_id, "padding") or 0


def _single_id(token_id: object, what: str) -> int | None:
    """Return a token's id; transformers' types would also allow lists of them."""
    if token_id is None or isinstance(token_id, int):
        return token_id
    raise DataError(f"the tokenizer has {token_id!r} for its {what} token; it has to be one id")


def _encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, where: str, *, add_special_tokens: bool, literal: bool = True
) -> list[int]:
    """Return the token ids of `text`; special tokens in it are plain characters when `literal`."""
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, split_special_tokens=literal)["input_ids"]
    if literal and tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        unknown = sorted(
            {c for c in text if tokenizer.unk_token_id in tokenizer(c, split_special_tokens=True).input_ids}
        )
        raise DataError(
            f"{where} has characters that {tokenizer_name(tokenizer)} can't write: {unknown}; in {text[:80]!r}"
        )
    return ids


def _encode_messages(tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str) -> list[int]:
    """Return the token ids of a conversation, with the template's opening of the next answer.

    Special tokens in a message are hidden behind marks while the template is rendered, and written as characters.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: {tokenizer_name(tokenizer)} has no chat template; set data.chat_template=false, or "
            "model.tokenizer to one that has it"
        )
    specials = [str(token) for token in tokenizer.all_special_tokens]
    pattern = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")
    contents = [message["content"] for message in messages]
    mark = next(chr(code) for code in range(0xE000, 0xF8FF) if all(chr(code) not in text for text in contents))
    hidden: list[str] = []

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"{mark}{len(hidden) - 1}{mark}"

    masked = [{**message, "content": pattern.sub(hide, message["content"])} for message in messages]
    rendered = _render(tokenizer, masked, where)
    ids: list[int] = []
    for place, piece in enumerate(rendered.split(mark)):
        is_hidden = place % 2 == 1
        text = hidden[int(piece)] if is_hidden else piece
        ids += _encode_text(tokenizer, text, where, add_special_tokens=False, literal=is_hidden)
    return ids


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str) -> str:
    """Return the conversation as the template writes it."""
    from jinja2 import TemplateError

    try:
        rendered: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise DataError(f"{where}: the chat template of {tokenizer_name(tokenizer)} refuses it: {error}") from error
    return rendered


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the words by which messages speak of a tokenizer."""
    return f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r}"
