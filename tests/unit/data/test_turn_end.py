import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rlpack.data.examples import Example, PromptDataset
from rlpack.data.prompts import tokenize_dataset
from rlpack.data.tokenization import character_tokenizer
from rlpack.data.turn_end import turn_end_id, turn_start

GEMMA = (
    "{% for m in messages %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}"
)
PLAIN_END = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
ANSWER_ENDS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %} <eos>{% endif %}{% endfor %}"


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz<> \n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "end"),
    [
        *((GEMMA, "<end>"), (ANSWER_ENDS, "<eos>"), (PLAIN_END, None), (None, None)),
        ("{% for m in messages %}<start>{{ m.content }}{% endfor %}", None),
        ("<start>{{ messages[0].content }}", None),  # leaves the answer out
        ("{{ raise_exception('only one question') }}", None),
    ],
)
def test_the_end_of_a_turn_is_the_special_token_after_the_answer(template: str | None, end: str | None):
    tokenizer = chat_tokenizer(template)
    assert turn_end_id(tokenizer) == (None if end is None else tokenizer.convert_tokens_to_ids(end))


@pytest.mark.parametrize(
    ("template", "is_used", "end"),
    [(GEMMA, True, "<end>"), (GEMMA, False, "<eos>"), (PLAIN_END, True, "<eos>"), (ANSWER_ENDS, True, "<eos>")],
)
def test_demonstrations_end_as_the_template_ends_an_answer(template: str, is_used: bool, end: str):
    tokenizer = chat_tokenizer(template)
    dataset = PromptDataset("rows", [Example("0", "add", demonstration="done <end>")])
    prompts = tokenize_dataset(dataset, tokenizer, chat_template=is_used, max_tokens=50, overlong="error")
    batch = prompts.demonstrations(np.array([0]), tokenizer)
    (ids,) = batch["input_ids"].rows()
    target = ids[int(batch["prompt_lengths"][0]) :].tolist()
    assert tokenizer.convert_ids_to_tokens(target) == [*"done <end>", end]


CHANNELS = (
    "{% for m in messages %}<start>{{ m.role }}{% if m.role == 'assistant' %}<end>final<end>{% else %} {% endif %}"
    "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<start>assistant{% endif %}"
)
EMPTY_THINKING = (
    "{% for m in messages %}<start>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "start"),
    [
        (CHANNELS, "<end>final<end>"),
        (EMPTY_THINKING, "<think>\n\n</think>\n\n"),
        *((template, "") for template in (GEMMA, PLAIN_END, ANSWER_ENDS, None, "{{ raise_exception('no') }}")),
    ],
)
def test_the_start_of_a_turn_is_what_the_template_writes_between_prompt_and_answer(template: str | None, start: str):
    assert turn_start(chat_tokenizer(template)) == start


@pytest.mark.parametrize(
    ("template", "start"), [(CHANNELS, ["<end>", *"final", "<end>"]), (EMPTY_THINKING, []), (GEMMA, [])]
)
def test_demonstrations_begin_with_special_tokens_of_the_template(template: str, start: list[str]):
    tokenizer = chat_tokenizer(template)
    dataset = PromptDataset("rows", [Example("0", "add", demonstration="done")])
    prompts = tokenize_dataset(dataset, tokenizer, chat_template=True, max_tokens=50, overlong="error")
    batch = prompts.demonstrations(np.array([0]), tokenizer)
    (ids,) = batch["input_ids"].rows()
    target = ids[int(batch["prompt_lengths"][0]) :].tolist()
    assert tokenizer.convert_ids_to_tokens(target) == [*start, *"done", "<end>"]
    whole = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "done"}]
    if template == CHANNELS:  # what the template renders of the conversation
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.apply_chat_template(whole, tokenize=False)
