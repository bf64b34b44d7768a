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


def turn_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes between a generation prompt and the assistant's message.

    Qwen3's writes an empty `<think>` section, and that of gpt-oss the channel of the final answer.

    Returns:
        "" without a chat template, or if it rejects a question and an answer, or writes nothing.
    """
    if tokenizer.chat_template is None:
        return ""
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        prompt = str(tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True))
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program, which need not take an answer
        return ""
    start, found, _ = whole.removeprefix(prompt).rpartition(_ANSWER)
    return start if found and whole.startswith(prompt) and start.strip() else ""


def turn_start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of `turn_start` if it has special tokens, which a dataset's text can't have; else ()."""
    start = turn_start(tokenizer)
    if not start:
        return ()
    ids: list[int] = tokenizer(start, add_special_tokens=False)["input_ids"]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    has_special = any(number in special and number != tokenizer.unk_token_id for number in ids)
    return tuple(ids) if has_special else ()
