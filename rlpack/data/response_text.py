"""The text of a response, as reward functions, judges and readers see it."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase


def response_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: Collection[int] | None) -> str:
    """Return the text of a response's token ids.

    Args:
        tokenizer: the policy's.
        ids: the response.
        ends: with `reward.special_tokens`, the ids that end a response, of which the last token is left out; None to
            leave out all special tokens.
    """
    if ends is None:
        return tokenizer.decode(ids, skip_special_tokens=True)  # pyright: ignore[reportReturnType]
    kept = ids[:-1] if len(ids) and ids[-1] in ends else ids
    return tokenizer.decode(kept, skip_special_tokens=False)  # pyright: ignore[reportReturnType]
