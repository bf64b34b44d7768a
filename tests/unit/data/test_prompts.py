import datetime
import logging

import numpy as np
import pytest
import torch
from transformers.utils import chat_template_utils

from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.data import prompts as prompts_module
from rlpack.data.examples import Example, PromptDataset, fewest_tokens
from rlpack.data.prompts import Prompts, tokenize_dataset
from rlpack.data.tokenization import character_tokenizer, tokenize_prompts

EXAMPLES = (
    Example("a", "12=", answer="3", demonstration="3", columns={"level": 1}),
    Example("b", "3=", answer="3", demonstration="03", columns={"level": 2}),
    Example("c", "1230=", answer="6", columns={}),
)
TOKENIZER = character_tokenizer("0123=")


def prompts(max_tokens: int = 5, overlong: str = "error") -> Prompts:
    return tokenize_dataset(
        PromptDataset("sums", EXAMPLES),
        TOKENIZER,
        chat_template=False,
        max_tokens=max_tokens,
        overlong=overlong,  # pyright: ignore[reportArgumentType]
    )


def test_a_batch_has_the_token_ids_and_columns_of_its_rows():
    batch = prompts().batch(np.array([2, 0]))
    assert [TOKENIZER.decode(row.tolist()) for row in batch["input_ids"].rows()] == ["1230=", "12="]
    assert (batch["uid"], batch["prompt"], batch["answer"]) == (["c", "a"], ["1230=", "12="], ["6", "3"])
    assert batch["level"] == [None, 1]


@pytest.mark.parametrize(
    ("answers", "column", "expected"),
    [
        ((None, None), (None, None), [None, None]),
        ((None, None), ("x", "y"), ["x", "y"]),
        (("1", None), ("x", "y"), ["1", None]),
    ],
)
def test_without_answers_a_batch_has_the_column_of_that_name(answers, column, expected):
    rows = zip("ab", answers, column, strict=True)
    examples = [Example(uid, "1=", answer, columns={"answer": other}) for uid, answer, other in rows]
    split = Prompts(examples, Ragged.from_rows([[1], [1]], torch.int64))
    assert split.batch(np.array([0, 1]))["answer"] == expected


def test_demonstrations_are_responses_that_end_with_the_end_of_sequence():
    batch = prompts().demonstrations(np.array([1, 0]), TOKENIZER)
    texts = ["3=03<eos>", "12=3<eos>"]
    assert [TOKENIZER.decode(row.tolist()) for row in batch["input_ids"].rows()] == texts
    masks = [[False, False, True, True, True], [False, False, False, True, True]]
    assert [row.tolist() for row in batch["response_mask"].rows()] == masks
    assert (batch["prompt_lengths"].tolist(), batch["response_lengths"].tolist()) == ([2, 3], [3, 2])
    with pytest.raises(DataError, match=r"demonstration of 'c' is missing; .* data.completion_column"):
        prompts().demonstrations(np.array([0, 2]), TOKENIZER)


def test_prompts_that_are_too_long_are_an_error_or_dropped(caplog: pytest.LogCaptureFixture):
    with pytest.raises(DataError, match=r"sums: prompt 'c' has 5 tokens, which exceeds 4; raise data.max"):
        prompts(4)
    with caplog.at_level(logging.WARNING):
        assert [example.uid for example in prompts(4, "drop").examples] == ["a", "b"]
    assert "dropped 1 of 3 prompts over 4 tokens" in caplog.text
    with pytest.raises(DataError, match=r"every prompt exceeds data.max_prompt_tokens=1; raise it"):
        prompts(1, "drop")


def test_a_prompt_of_megabytes_is_refused_or_dropped_before_it_is_tokenized():
    class Counting(type(TOKENIZER)):
        def __call__(self, text=None, *arguments, **options):
            assert text
            assert max(map(len, text)) < 100_000
            return super().__call__(text, *arguments, **options)

    tokenizer = Counting(tokenizer_object=TOKENIZER.backend_tokenizer, unk_token="<unk>", eos_token="<eos>")
    huge = PromptDataset("sums", [*EXAMPLES, Example("huge", "1" * 10_000_000, answer="7")])
    with pytest.raises(DataError, match=r"sums: prompt 'huge' has 10,000,000 characters, at least 500,000 tokens"):
        tokenize_dataset(huge, tokenizer, chat_template=False, max_tokens=5, overlong="error")
    left = tokenize_dataset(huge, tokenizer, chat_template=False, max_tokens=5, overlong="drop")
    assert [example.uid for example in left.examples] == [example.uid for example in EXAMPLES]


CHATS = (
    "12=",
    [{"role": "system", "content": "3"}, {"role": "user", "content": "1<eos>2="}],
    "<pad><eos>",
    [{"role": "user", "content": "0=" * 20}],
    [{"role": "user", "content": "", "name": "<eos>"}],
    "<",
    "1<e",
)


@pytest.mark.parametrize("chat_template", [True, False])
def test_many_prompts_have_the_same_token_ids_as_each_alone(chat_template: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts_module, "_CHUNK_PROMPTS", 3)
    tokenizer = character_tokenizer("0123=<>eosadpu")
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }}<pad>{% endfor %}"
        "{% for m in messages %}<eos>{{ m.name }}{{ m.content }}<eos>{% endfor %}<e"
    )
    tools = [{"type": "function", "function": {"name": "sad<eos>", "description": "s", "parameters": {}}}]
    examples = [
        Example(f"{number}-{'u' * len(columns)}", prompt, columns=columns)
        for number, prompt in enumerate(CHATS)
        for columns in ({}, {"tools": tools})
        if chat_template or isinstance(prompt, str)
    ]
    alone = [tokenize_prompts(tokenizer, [example], chat_template=chat_template)[0] for example in examples]

    def encoded(max_tokens: int) -> Prompts:
        return tokenize_dataset(
            PromptDataset("sums", examples),
            tokenizer,
            chat_template=chat_template,
            max_tokens=max_tokens,
            overlong="drop",
        )

    assert [row.tolist() for row in encoded(100).input_ids.rows()] == alone
    assert {tokenizer.eos_token_id in ids for ids in alone} == {chat_template}
    assert tokenize_prompts(tokenizer, examples, chat_template=chat_template) == alone
    for length in {len(ids) for ids in alone}:
        left = encoded(length)
        assert [row.tolist() for row in left.input_ids.rows()] == [ids for ids in alone if len(ids) <= length]
        fits = [example.uid for example, ids in zip(examples, alone, strict=True) if len(ids) <= length]
        assert [example.uid for example in left.examples] == fits


@pytest.mark.parametrize("chat_template", [True, False])
def test_prompts_are_encoded_by_one_call_per_thousand(chat_template: bool):
    calls: list[int] = []

    class Counting(type(TOKENIZER)):
        def __call__(self, text=None, *arguments, **options):
            calls.append(1 if isinstance(text, str) else len(text or ()))
            return super().__call__(text, *arguments, **options)

    tokenizer = Counting(tokenizer_object=TOKENIZER.backend_tokenizer, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = "{{ messages[0].content }}="
    dataset = PromptDataset("sums", [Example(str(number), "12") for number in range(2001)])
    tokenize_dataset(dataset, tokenizer, chat_template=chat_template, max_tokens=5, overlong="error")
    assert sorted(calls)[-2:] == [1000, 1000]
    assert len(calls) <= 4


def test_a_prompt_of_any_chunk_is_named_in_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts_module, "_CHUNK_PROMPTS", 2)
    with pytest.raises(DataError, match=r"sums: prompt 'c' has 5 tokens, which exceeds 4; raise data.max"):
        prompts(4)
    dataset = PromptDataset("sums", [*EXAMPLES, Example("row-7", "1Z=")])
    for chat_template, place in ((True, "prompt 'row-7', as the chat template renders it,"), (False, "prompt 'row-7'")):
        tokenizer = character_tokenizer("0123=")
        tokenizer.chat_template = "{{ messages[0].content }}"
        with pytest.raises(DataError, match=place + r" has characters that .* cannot encode: \['Z'\]; in '1Z='"):
            tokenize_dataset(dataset, tokenizer, chat_template=chat_template, max_tokens=5, overlong="error")


def test_encoding_many_prompts_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    prompts()
    assert not caplog.records
    monkeypatch.setattr(prompts_module, "_NOTED_PROMPTS", 3)
    prompts()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "sums: encoding 3 prompts")
    ]


def test_the_bound_by_characters_never_refuses_what_fits():
    spaces, letters = Example("a", " " * 200_000 + "b"), Example("b", "b" * 200_000)
    assert fewest_tokens(spaces, 8, longest_token=16) == 0  # a tokenizer may drop them
    assert fewest_tokens(letters, 8, longest_token=16) == 200_000 // (4 * 16)
    assert fewest_tokens(letters, 4_000, longest_token=16) == 0
    conversation = [{"role": "user", "content": "b" * 200_000}, {"role": "user", "content": "b"}]
    assert fewest_tokens(Example("c", conversation), 8, longest_token=1) == 0  # a template may leave out the first


def test_columns_that_only_some_rows_have_reach_the_reward():
    examples = [Example("a", "1=", columns={"x": 1}), Example("b", "2=", columns={"y": 2})]
    dataset = PromptDataset("sums", examples)
    batch = tokenize_dataset(dataset, TOKENIZER, chat_template=False, max_tokens=5, overlong="error").batch(
        np.arange(2)
    )
    assert (batch["x"], batch["y"]) == ([1, None], [None, 2])


def test_the_fingerprint_changes_with_the_data():
    fingerprints = {prompts().fingerprint, prompts(4, "drop").fingerprint}
    changed = PromptDataset("sums", [*EXAMPLES[:2], Example("c", "1230=", answer="7")])
    other = tokenize_dataset(changed, TOKENIZER, chat_template=False, max_tokens=5, overlong="error")
    assert len(fingerprints | {other.fingerprint}) == 3
    assert prompts().fingerprint in fingerprints


def on_day(day: int, template: str, monkeypatch: pytest.MonkeyPatch, examples=EXAMPLES) -> Prompts:
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 12, day, tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    tokenizer = character_tokenizer("0123=")
    tokenizer.chat_template = template
    return tokenize_dataset(
        PromptDataset("sums", examples), tokenizer, chat_template=True, max_tokens=50, overlong="error"
    )


DATED = "{{ strftime_now('%d') }}={{ messages[0].content }}"


def test_the_fingerprint_of_prompts_with_a_date_is_the_same_the_next_day(monkeypatch: pytest.MonkeyPatch):
    first, second = (on_day(day, DATED, monkeypatch) for day in (12, 13))
    assert first.input_ids.values.tolist() != second.input_ids.values.tolist()
    assert second.has_fingerprint(first.fingerprint)
    others = [on_day(13, DATED + "=", monkeypatch), on_day(13, DATED, monkeypatch, EXAMPLES[:2])]
    assert not any(other.has_fingerprint(first.fingerprint) for other in others)


def test_a_fingerprint_of_dated_token_ids_is_valid_on_the_same_day(monkeypatch: pytest.MonkeyPatch):
    first, again, next_day = (on_day(day, DATED, monkeypatch) for day in (12, 12, 13))
    earlier = Prompts(first.examples, first.input_ids).fingerprint  # as earlier versions took it
    assert again.has_fingerprint(earlier)
    assert not next_day.has_fingerprint(earlier)
