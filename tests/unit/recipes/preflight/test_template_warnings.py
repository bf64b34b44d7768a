"""Prompts of plain text for a tokenizer with a chat template."""

import string

import pytest
from transformers import PreTrainedTokenizerFast

from rlpack.config.schema import Data, Model
from rlpack.data.examples import Example
from rlpack.data.prompts import Prompts
from rlpack.data.tokenization import character_tokenizer, tokenize_prompts
from rlpack.recipes.preflight.template_warnings import template_warnings
from tests.builders import MODEL, tiny_config

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}<|im_start|>"
PLAIN = "data.chat_template is false, so prompts are used as plain text, but the tokenizer has a chat template; "


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    result = character_tokenizer(string.printable)
    result.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|other|>"]})
    result.chat_template = TEMPLATE
    return result


def warnings(tokenizer, *texts, chat_template=False, path="some/model"):
    examples = [Example(uid=str(number), prompt=text) for number, text in enumerate(texts)]
    prompts = Prompts(examples, tokenize_prompts(tokenizer, examples, chat_template=chat_template))
    model = Model(config=MODEL) if path is None else Model(path=path)
    return template_warnings(tiny_config(model=model, data=Data(chat_template=chat_template)), tokenizer, prompts)


def test_plain_text_for_a_model_with_a_template_is_a_warning(tokenizer):
    (warning,) = warnings(tokenizer, "a+b=", "<|other|>")
    assert warning.startswith(PLAIN)
    assert "set data.chat_template=true" in warning
    assert warnings(tokenizer, "a+b=", path=None) == []
    assert warnings(tokenizer, "a+b=", chat_template=True) == []
    assert warnings(tokenizer, [{"role": "user", "content": "a"}], chat_template=True) == []
    tokenizer.chat_template = None
    assert warnings(tokenizer, "a+b=") == []


@pytest.mark.parametrize("chat_template", [False, True])
def test_prompts_that_were_rendered_before_are_a_warning(tokenizer, chat_template):
    (warning,) = warnings(tokenizer, "a<|im_start|>", "b<|im_start|>a<|im_end|>", "a", chat_template=chat_template)
    assert warning.startswith("2 of 3 prompts contain '<|im_start|>', a special token of the chat template, but text")
    assert "set data.chat_template=true" in warning
