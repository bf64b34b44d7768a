from typing import Any

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.store import LocalStore
from rlpack.data.examples import Example
from rlpack.data.tokenization import character_tokenizer, tokenize_prompts
from rlpack.recipes.driver.displayed_texts import DisplayedText, displayed_texts

TEMPLATE = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}:{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS: Any = [[{"name": "adder", "strict": None}], None]


def test_prompts_are_displayed_with_the_tools_that_the_model_saw() -> None:
    tokenizer = character_tokenizer('abcdefghijklmnopqrstuvwxyz:{}[]", ')
    tokenizer.chat_template = TEMPLATE
    messages = [[{"role": "user", "content": "add"}], [{"role": "user", "content": "go"}]]
    columns = {"prompt": messages, "tools": TOOLS, "completion": ["x", "y"], "answer": [3, None]}
    first, second = displayed_texts(tokenizer, LocalStore(), BatchedDataDict(columns))
    assert first == DisplayedText('{"name": "adder"}:add', "x", "3")
    assert second == DisplayedText(":go", "y", None)
    (seen,) = tokenize_prompts(tokenizer, [Example("0", messages[0], columns={"tools": TOOLS[0]})], chat_template=True)
    assert tokenizer.decode(seen) == first.prompt


def test_a_dataset_may_have_no_tools() -> None:
    columns = {"prompt": ["1+1"], "completion": ["2"], "answer": [2]}
    (only,) = displayed_texts(character_tokenizer("12+"), LocalStore(), BatchedDataDict(columns))
    assert only == DisplayedText("1+1", "2", "2")
