"""The token with which a chat template ends the assistant's turn."""

from typing import Any

from transformers import PreTrainedTokenizerBase

# Texts that no chat template changes.
_QUESTION, _ANSWER = "question", "answer"


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the special token that the chat template puts after the assistant's message.

    It is often, but not always, the tokenizer's end of sequence: Gemma's `<end_of_turn>` is not.

    Returns:
        None without a chat template, or if it rejects a question and an answer, or puts no special token after one.
    """
    if tokenizer.chat_template is None:
        return None
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered: Any = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # noqa: BLE001 - a template is a program, which need not take an answer
        return None
    _, _, after = str(rendered).rpartition(_ANSWER)
    ids: list[int] = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder
    is_special = ids and (ids[0] in tokenizer.all_special_ids or (ids[0] in added and added[ids[0]].special))
    return ids[0] if is_special and _ANSWER in str(rendered) else None
