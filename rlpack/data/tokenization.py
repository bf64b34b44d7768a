"""Encode prompts and demonstrations with any tokenizer, and build character-level tokenizers.

Invariant: user text never becomes a special token; `<eos>` inside a prompt is five characters.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlpack.batch.errors import DataError
from rlpack.data.examples import SPECIAL_TOKENS, Example, Prompt, conversation, prompt_text
from rlpack.data.rendering import render, render_pieces, tokenizer_name
from rlpack.data.tools import COLUMN, tools_of

PAD, EOS, UNKNOWN = SPECIAL_TOKENS


class _SpecialTokens(NamedTuple):
    """Special tokens: those with a role, such as the end of a sequence, and templates' own.

    Attributes:
        pattern: matches any of them.
        spellings: token ids and what the tokens look like in a text. Single characters are left out: there is no other
            way to encode them.
        unknown: id of the unknown token.
    """

    pattern: re.Pattern[str]
    spellings: Mapping[int, str]
    unknown: int | None


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    r"""Return a tokenizer with one token for each character of `alphabet`, after `<pad>`, `<eos>` and `<unk>`.

    The tokenizer is saved and loaded like any other transformers tokenizer.

    >>> tokenizer = character_tokenizer("ab\n")
    >>> tokenizer.encode("ba\n"), tokenizer.decode([4, 3, 5]), tokenizer.eos_token_id
    ([4, 3, 5], 'ba\n', 1)

    Raises:
        DataError: the alphabet is empty or has a character twice.
    """
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if not alphabet or repeated:
        raise DataError(f"the alphabet {alphabet!r} must have every character once; it repeats {repeated}")
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


def holds_character_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a saved `character_tokenizer`.

    For some types of models, such as qwen2, transformers' AutoTokenizer replaces any tokenizer's class with that of the
    model type, which drops spaces and unknown characters; PreTrainedTokenizerFast loads what was saved.
    """
    try:
        saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return saved["model"]["type"] == "WordLevel"
    except (OSError, ValueError, LookupError, TypeError):
        return False


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, chat_template: bool
) -> list[list[int]]:
    """Return the token ids that the model continues, for each example.

    Args:
        tokenizer: any tokenizer. Tokens that it adds before a text (beginning of sequence) are kept; an
            end-of-sequence token after it is removed.
        examples: prompts of text, or of chat messages.
        chat_template: render prompts through the tokenizer's chat template, text as one user message, and messages
            with the tools in their example's column `tools`.

    Raises:
        DataError: messages without a chat template, a column `tools` with other values than tools, text that the
            tokenizer cannot encode, or an empty prompt.
    """
    specials = _special_tokens(tokenizer)
    has_template = tokenizer.chat_template is not None
    if chat_template:
        for example in () if has_template else examples:
            prompt_text(example, has_template=False)
        encoded = _encode_conversations(tokenizer, examples, specials)
    else:
        texts = [prompt_text(example, has_template=has_template) for example in examples]
        places = [f"prompt {example.uid!r}" for example in examples]
        encoded = _encode_texts(tokenizer, texts, places, specials, add_special_tokens=True)
        end = tokenizer.eos_token_id
        encoded = [ids[:-1] if len(ids) > 1 and ids[-1] == end else ids for ids in encoded]
    for example, ids in zip(examples, encoded, strict=True):
        if not ids:
            raise DataError(f"prompt {example.uid!r} has no tokens: {example.prompt!r}; a model needs at least one")
    return encoded


def tokenize_demonstrations(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], end: int | None = None
) -> list[list[int]]:
    """Return the token ids of each demonstration.

    Args:
        tokenizer: any tokenizer.
        examples: examples with demonstrations.
        end: id of the token with which each ends; None for the end of sequence.

    Raises:
        DataError: an example has no demonstration, the tokenizer has no end-of-sequence token in place of `end`, or it
            cannot encode a text.
    """
    texts, places = [], [f"demonstration of {example.uid!r}" for example in examples]
    for example, place in zip(examples, places, strict=True):
        if example.demonstration is None:
            raise DataError(f"{place} is missing; supervised steps need data.completion_column")
        texts.append(example.demonstration)
    last = tokenizer.eos_token_id if end is None else end
    if not isinstance(last, int):
        raise DataError(
            f"{tokenizer_name(tokenizer)} has no end-of-sequence token (eos_token), which demonstrations end with; set "
            "model.tokenizer to one with the same vocabulary that has one"
        )
    specials = _special_tokens(tokenizer)
    return [[*ids, last] for ids in _encode_texts(tokenizer, texts, places, specials, add_special_tokens=False)]


def prompt_for_display(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tools: Any = None) -> str:
    """Return a prompt as people read it: messages as the chat template renders them for the model.

    Args:
        tokenizer: any tokenizer.
        prompt: text, or chat messages.
        tools: the value of the prompt's column `tools`, if there is one.
    """
    if isinstance(prompt, str):
        return prompt
    example = Example("", prompt, columns={COLUMN: tools})
    try:
        return render(tokenizer, prompt, "a prompt", tools_of(example))
    except (DataError, ValueError):
        return conversation(prompt)


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the end-of-sequence token; None if the tokenizer has none."""
    return _single_id(tokenizer.eos_token_id, "end-of-sequence")


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id for padded slots: the padding token, or 0.

    No real token attends to them.
    """
    return _single_id(tokenizer.pad_token_id, "padding") or 0


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the vocabulary, the special tokens and, for fast tokenizers, the way text becomes tokens.

    >>> tokenizer_hash(character_tokenizer("ab")) == tokenizer_hash(character_tokenizer("ba"))
    False
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        text = tokenizer.backend_tokenizer.to_str()
    else:
        text = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    return sha256(json.dumps([text, special]).encode()).hexdigest()


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of the vocabulary's longest token, special tokens aside."""
    special = set(tokenizer.all_special_tokens)
    return max((len(token) for token in tokenizer.get_vocab() if token not in special), default=1)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> _SpecialTokens:
    """Return all special tokens of a tokenizer."""
    spellings = dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))
    spellings |= {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens = sorted({*spellings.values()} - {""}, key=len, reverse=True)
    return _SpecialTokens(
        re.compile("|".join(map(re.escape, tokens)) or r"(?!)"),
        {number: token for number, token in spellings.items() if len(token) > 1},
        _single_id(tokenizer.unk_token_id, "unknown"),
    )


def _single_id(token_id: object, what: str) -> int | None:
    """Return a token's id, which transformers' types also allow to be a list."""
    if token_id is None or isinstance(token_id, int):
        return token_id
    raise DataError(f"the tokenizer has {token_id!r} for its {what} token; it must be one id")


def _encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    places: Sequence[str],
    specials: _SpecialTokens | None,
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    """Return the token ids of each text; with `specials`, those in a text become plain characters."""
    if not texts:
        return []
    is_literal = specials is not None
    encoded: list[list[int]] = tokenizer(
        texts, add_special_tokens=add_special_tokens, split_special_tokens=is_literal, return_attention_mask=False
    )["input_ids"]
    if specials is None:
        return encoded
    checked = {*specials.spellings, specials.unknown}
    counts = [sum(map(checked.__contains__, ids)) for ids in encoded]
    if not any(counts):
        return encoded
    around = tokenizer("", add_special_tokens=add_special_tokens)["input_ids"]
    num_around = sum(map(checked.__contains__, around))
    return [
        ids if count <= num_around else _spell_specials(tokenizer, text, place, ids, specials)
        for text, place, ids, count in zip(texts, places, encoded, counts, strict=True)
    ]


def _spell_specials(
    tokenizer: PreTrainedTokenizerBase, text: str, place: str, ids: list[int], specials: _SpecialTokens
) -> list[int]:
    """Return a text's token ids with each special token in it as the tokens of its characters.

    A Unigram vocabulary has special tokens among its pieces, which `split_special_tokens` does not turn off. Tokens
    that the tokenizer adds around the text are kept.
    """
    own: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if specials.unknown in own:
        raise DataError(_unknown_characters(tokenizer, text, place))
    spellings = [specials.spellings.get(token_id) for token_id in own]
    names = sorted({spelling for spelling in spellings if spelling is not None})
    if not names:
        return ids
    spelled: list[int] = []
    for token_id, spelling in zip(own, spellings, strict=True):
        pieces: Any = [token_id] if spelling is None else tokenizer.convert_tokens_to_ids([*spelling])
        spelled += pieces
    starts = [start for start in range(len(ids) - len(own) + 1) if ids[start : start + len(own)] == own]
    if specials.unknown in spelled or not starts:  # missing characters are unknown; None without an unknown token
        raise DataError(
            f"{place} has {', '.join(names)}, which {tokenizer_name(tokenizer)} can encode only as a special token; "
            f"change the text {text[:80]!r}"
        )
    # In a text of nothing but the token that is added, the added one is taken to be the first.
    return [*ids[: starts[-1]], *spelled, *ids[starts[-1] + len(own) :]]


def _unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str, place: str) -> str:
    def is_unknown(part: str) -> bool:
        ids = tokenizer(part, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return tokenizer.unk_token_id in ids

    # A word of known characters may be unknown too, such as the spelling of the unknown token.
    unknown = {*filter(is_unknown, {*text})} or {*filter(is_unknown, text.split())}
    name = tokenizer_name(tokenizer)
    return (
        f"{place} has characters that {name} cannot encode: {sorted(unknown)}; in {text[:80]!r}; change the text, or "
        "set model.path to a model whose tokenizer has these characters"
    )


def _encode_conversations(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], specials: _SpecialTokens
) -> list[list[int]]:
    """Return the token ids of prompts as the chat template renders them; special tokens in their texts are characters.

    All rendered texts are encoded by one call, which uses all cores.
    """
    places = [f"prompt {example.uid!r}" for example in examples]
    prompts = [
        render_pieces(tokenizer, example, place, specials.pattern)
        for example, place in zip(examples, places, strict=True)
    ]
    rendered = [text for pieces in prompts for text in pieces[::2]]
    rest = iter(_encode_texts(tokenizer, rendered, places, None, add_special_tokens=False))
    encoded: list[list[int]] = []
    for pieces, place in zip(prompts, places, strict=True):
        ids: list[int] = []
        for number, text in enumerate(pieces):
            if number % 2:
                (of_piece,) = _encode_texts(tokenizer, [text], [place], specials, add_special_tokens=False)
            else:
                of_piece = next(rest)
                _check_rendered(tokenizer, text, place, of_piece, specials)
            ids += of_piece
        encoded.append(ids)
    return encoded


def _check_rendered(
    tokenizer: PreTrainedTokenizerBase, text: str, where: str, ids: list[int], specials: _SpecialTokens
) -> None:
    """Raise if a rendered text has more unknown tokens than the chat template spells out.

    Some tokenizers have one token that is both unknown and the end of a sequence, which templates do spell out.
    """
    if specials.unknown is None or ids.count(specials.unknown) <= text.count(str(tokenizer.unk_token)):
        return
    plain = specials.pattern.sub("", text)
    raise DataError(_unknown_characters(tokenizer, plain, f"{where}, as the chat template renders it,"))
