"""Prompts, demonstrations and reward functions that the tokenizer's chat template doesn't fit."""

import string

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Data, Model
from rlpack.config.sections.reward_sources import Reward
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


def warnings(tokenizer, *texts, chat_template=False, path="some/model", demonstration=None, **sections):
    examples = [Example(uid=str(n), prompt=text, demonstration=demonstration) for n, text in enumerate(texts)]
    encoded = tokenize_prompts(tokenizer, examples, chat_template=chat_template)
    prompts = Prompts(examples, Ragged.from_rows(encoded, torch.int64))
    model = Model(config=MODEL) if path is None else Model(path=path)
    config = tiny_config(model=model, data=Data(chat_template=chat_template), **sections)
    return template_warnings(config, tokenizer, prompts)


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


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
HAS_FORMAT = "rlpack.rewards.functions:has_format"


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        (Reward(function=HAS_FORMAT), "reward.arguments.is_opened=true"),
        (Reward(functions={"form": {"function": HAS_FORMAT}}), "reward.functions.form.arguments.is_opened=true"),
        (Reward(function=HAS_FORMAT, arguments={"tags": "think"}), "reward.arguments.is_opened=true"),
        (Reward(function=HAS_FORMAT, arguments={"is_opened": True}), None),
        (Reward(function=HAS_FORMAT, arguments={"tags": ["plan", "think"]}), None),
        (Reward(), None),
    ],
)
def test_a_section_that_the_template_opens_is_a_warning_for_the_format_reward(tokenizer, reward, key):
    tokenizer.chat_template = THINKS
    found = warnings(tokenizer, "a+b=", chat_template=True, reward=reward)
    assert [f"set {key}" in warning for warning in found] == ([] if key is None else [True])
    tokenizer.chat_template = TEMPLATE
    assert warnings(tokenizer, "a+b=", chat_template=True, reward=reward) == []


def test_a_beginning_that_demonstrations_lack_is_a_warning(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}<think>\n\n</think>\n{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (warning,) = warnings(tokenizer, "a", "b", chat_template=True, demonstration="4")
    assert warning.startswith(r"2 of 2 demonstrations lack '<think>\n\n</think>\n', which the chat template writes")
    assert warnings(tokenizer, "a", chat_template=True, demonstration="<think>2 + 2</think>4") == []
    assert warnings(tokenizer, "a", chat_template=True) == []
