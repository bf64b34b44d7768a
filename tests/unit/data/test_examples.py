from typing import Any

import pytest

from rlpack.batch.errors import DataError
from rlpack.data.examples import Example, characters, check_prompt, conversation
from rlpack.data.tokenization import character_tokenizer, tokenize_prompts

USER, CALL = {"role": "user", "content": "ab"}, {"function": {"name": "add", "arguments": {"a": 1}}}
TEMPLATE = "{% for m in messages %}{% if m.tool_calls %}+{% else %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_an_assistants_message_with_tool_calls_needs_no_content(content: dict[str, Any]):
    messages = [USER, {"role": "assistant", "tool_calls": [CALL], **content}, {"role": "tool", "content": "3"}]
    prompt = check_prompt(messages, "a.jsonl:1: prompt")
    assert prompt == messages
    tokenizer = character_tokenizer("ab+3")
    tokenizer.chat_template = TEMPLATE
    (ids,) = tokenize_prompts(tokenizer, [Example("0", prompt)], chat_template=True)
    assert tokenizer.decode(ids) == "ab+3"
    assert {*"ab3"} <= {*characters([Example("0", prompt)])}


def test_tool_calls_without_content_are_shown():
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    shown = '[{"function": {"name": "add", "arguments": {"a": 1}}}]'
    assert conversation(messages) == f"user: ab\nassistant: {shown}"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "user", "content": None, "tool_calls": [CALL]},
    ],
)
def test_other_messages_without_content_are_errors_that_name_the_way_out(message: dict[str, Any]):
    with pytest.raises(
        DataError, match=r"^a\.jsonl:1: prompt, message 0: content is None or missing; give it text, which may be empty"
    ):
        check_prompt([message, USER], "a.jsonl:1: prompt")
    with pytest.raises(DataError, match=r"message 0: content is 3 \(int\); it must be text"):
        check_prompt([message | {"content": 3}, USER], "a.jsonl:1: prompt")
