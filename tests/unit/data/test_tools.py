import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlpack.batch.errors import DataError
from rlpack.data.examples import Example
from rlpack.data.tokenization import character_tokenizer, tokenize_prompts
from rlpack.data.tools import tools_of

TEMPLATE = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}:{% for m in messages %}{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "go"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "adder", "parameters": {"a": {"type": "n"}}}}]


def tool_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer('abcdefghijklmnopqrstuvwxyz<>:{}[]", ')
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rendered(tools: Any, prompt: Any = MESSAGES) -> list[int]:
    (ids,) = tokenize_prompts(tool_tokenizer(), [Example("a", prompt, columns={"tools": tools})], chat_template=True)
    return ids


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [{**TOOLS[0], "strict": None}]])
def test_tools_reach_the_chat_template(tools: Any):
    tokenizer = tool_tokenizer()
    expected: Any = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    assert "adder" in expected
    assert rendered(tools) == tokenizer.encode(expected)


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_a_prompt_may_have_no_tools(tools: Any):
    assert tools_of(Example("a", MESSAGES, columns={"tools": tools})) is None
    assert rendered(tools) == tool_tokenizer().encode(":go")


def test_a_prompt_of_text_has_no_tools():
    assert rendered("saw, hammer", "go") == tool_tokenizer().encode(":go")


def test_special_tokens_in_tools_are_characters():
    ids = rendered([{"<eos>": "a <pad>"}])
    assert tool_tokenizer().decode(ids) == '{"<eos>": "a <pad>"}:go'
    assert not {0, 1, 2} & {*ids}


def test_null_in_json_text_stays():
    assert tools_of(Example("a", MESSAGES, columns={"tools": '[{"default": null}]'})) == [{"default": None}]


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("[{", r"'\[\{' \(str\), which is not JSON \(.*\); give it a list of JSON objects"),
        ("[" * 100_000, r"which is not JSON"),
        ('{"name": "adder"}', r"\(str\); give it a list of JSON objects, JSON text of one, or null, or rename"),
        ({"name": "adder"}, r"\(dict\); give it a list"),
        (["adder"], r"\(list\); give it a list"),
        (0, r"is 0 \(int\); give it a list"),
        ([{"name": b"a"}], r"\(list\), which is not JSON \(.*bytes"),
        ('[{"name": "\\ud800"}]', r"has an unpaired surrogate"),
    ],
)
def test_other_values_are_errors_that_name_prompt_and_column(tools: Any, problem: str):
    with pytest.raises(DataError, match=rf"^prompt 'train-3': column tools (is )?.*{problem}"):
        tools_of(Example("train-3", MESSAGES, columns={"tools": tools}))
