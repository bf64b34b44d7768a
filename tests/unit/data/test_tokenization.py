import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

from rlpack.batch.errors import DataError
from rlpack.data.arithmetic import ALPHABET
from rlpack.data.examples import Example, characters
from rlpack.data.tokenization import (
    character_tokenizer,
    prompt_for_display,
    tokenize_demonstrations,
    tokenize_prompts,
)

MIXED = "abeos<>/=# \t\n\0éß😀אb̈"[:-2] + "\u0308"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def encode_prompt(tokenizer, example, *, chat_template):
    (ids,) = tokenize_prompts(tokenizer, [example], chat_template=chat_template)
    return ids


def encode_demonstration(tokenizer, example):
    (ids,) = tokenize_demonstrations(tokenizer, [example])
    return ids


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer(MIXED)


@pytest.fixture
def chat():
    tokenizer = character_tokenizer(MIXED + "u")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def unigram_tokenizer(letters):
    """Return a tokenizer as SentencePiece makes them: special tokens are pieces that cost nothing."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<pad>", 0.0), ("▁", -2.0), *((c, -3.0) for c in letters)]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from(MIXED), min_size=1))
def test_every_character_is_one_token_and_decodes_to_itself(tokenizer, text):
    ids = encode_prompt(tokenizer, Example("0", text), chat_template=False)
    assert ids == [3 + MIXED.index(character) for character in text]
    assert tokenizer.decode(ids) == text


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    example = Example("0", "ab \n😀<eos>")
    ids = encode_prompt(loaded, example, chat_template=False)
    assert ids == encode_prompt(tokenizer, example, chat_template=False)
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, 3 + len(MIXED))
    assert loaded.decode(ids) == "ab \n😀<eos>"


def test_special_tokens_in_user_text_are_characters(tokenizer):
    ids = encode_prompt(tokenizer, Example("0", "a<eos>"), chat_template=False)
    assert ids == [3 + MIXED.index(character) for character in "a<eos>"]


@pytest.mark.parametrize("text", ["a</s>b <pad>", "</s>", "<s></s>", "ab <s> </s>", "a b", "</s"])
def test_special_tokens_among_the_pieces_of_a_vocabulary_are_characters(text):
    tokenizer = unigram_tokenizer("abpdks</>")
    spelled = [tokenizer.convert_tokens_to_ids(c) for c in "▁" + text.replace(" ", "▁")]
    assert tokenizer.decode(spelled) == text
    assert encode_prompt(tokenizer, Example("0", text), chat_template=False) == [1, *spelled]
    assert encode_demonstration(tokenizer, Example("0", "a", demonstration=text)) == [*spelled, 2]
    tokenizer.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}</s>"
    first, *inside, last = encode_prompt(tokenizer, Example("0", text), chat_template=True)
    assert (first, last) == (1, 2)
    assert not {0, 1, 2, 3} & {*inside}
    assert tokenizer.decode(inside).replace(" ", "") == text.replace(" ", "")


def test_special_tokens_that_no_characters_spell_are_refused():
    tokenizer = unigram_tokenizer("ab<s>")
    with pytest.raises(DataError, match=r"prompt 'row-7' has </s>, which .* only as a special token; .* 'a</s>b'"):
        encode_prompt(tokenizer, Example("row-7", "a</s>b"), chat_template=False)
    with pytest.raises(DataError, match=r"prompt 'row-7' has characters that .* cannot encode: \['<unk>'\]"):
        encode_prompt(unigram_tokenizer("abunk<>"), Example("row-7", "a <unk>"), chat_template=False)


def test_a_special_token_of_one_character_is_that_character_in_a_text():
    tokenizer = character_tokenizer("ab!")
    tokenizer.pad_token = "!"
    assert encode_prompt(tokenizer, Example("0", "a!"), chat_template=False) == [3, 5]


def test_the_unknown_token_may_also_begin_a_sequence():
    tokenizer = character_tokenizer("ab<eos>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    tokenizer.backend_tokenizer.model = models.WordLevel(tokenizer.get_vocab(), unk_token="<eos>")
    tokenizer.unk_token = "<eos>"
    assert encode_prompt(tokenizer, Example("0", "ab<eos>"), chat_template=False) == [1, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(DataError, match=r"prompt 'row-7' has characters that .* cannot encode: \['Z'\]"):
        encode_prompt(tokenizer, Example("row-7", "aZ"), chat_template=False)


def test_demonstrations_end_with_one_end_of_sequence(tokenizer):
    ids = encode_demonstration(tokenizer, Example("0", "a", demonstration="b<eos>"))
    assert ids == [3 + MIXED.index(character) for character in "b<eos>"] + [tokenizer.eos_token_id]


def test_messages_are_rendered_and_their_special_tokens_are_characters(chat):
    letter = {character: 3 + index for index, character in enumerate(MIXED + "u")}
    spelled = [letter[character] for character in "<eos>"]
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": "a<eos><eos>b"}]
    expected = [letter[c] for c in "<s>b"] + [1] + [letter[c] for c in "<u>a"]
    expected += spelled + spelled + [letter["b"], 1] + [letter[c] for c in "<a>"]
    assert encode_prompt(chat, Example("0", messages), chat_template=True) == expected


def test_special_tokens_that_only_the_template_uses_are_characters_in_messages(chat):
    chat.add_tokens([AddedToken("<a>", special=True)])
    letter = {character: 3 + index for index, character in enumerate(MIXED + "u")}
    (header,) = chat.encode("<a>")
    assert "<a>" not in chat.all_special_tokens
    expected = [letter[c] for c in "<u><a>"] + [1, header]
    assert encode_prompt(chat, Example("0", "<a>"), chat_template=True) == expected


@pytest.mark.parametrize(
    ("field", "template"),
    [
        ({"name": "<eos>"}, "{{ m.name }}"),
        ({"tool_calls": [{"function": {"arguments": {"a": "<eos>"}}}]}, "{{ m.tool_calls[0].function.arguments.a }}"),
        ({"o": {"<eos>": 1}}, "{% for k in m.o %}{{ k }}{% endfor %}"),
        ({"o": ("<eos>",)}, "{{ m.o[0] }}"),
    ],
)
def test_special_tokens_in_any_field_of_a_message_are_characters(chat, field, template):
    chat.chat_template = "{% for m in messages %}" + template + "{% endfor %}<eos>"
    messages = [{"role": "user", "content": "a", **field}]
    expected = [3 + MIXED.index(character) for character in "<eos>"] + [1]
    assert encode_prompt(chat, Example("0", messages), chat_template=True) == expected


@pytest.mark.parametrize("template", ["{{ m.o | tojson }}", "{{ m.o | tojson(ensure_ascii=true) }}", "{{ m.o }}"])
def test_special_tokens_in_an_object_that_a_template_renders_are_characters(template):
    tokenizer = character_tokenizer("<eos>[]'\"")
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}<eos>"
    ids = encode_prompt(tokenizer, Example("0", [{"role": "user", "content": "e", "o": ["<eos>"]}]), chat_template=True)
    assert "".join(tokenizer.convert_ids_to_tokens(ids[:-1])).replace("'", '"') == '["<eos>"]'
    assert ids[-1] == tokenizer.eos_token_id


def test_any_character_may_be_in_any_field_of_a_message():
    tokenizer = character_tokenizer("\ue000\ue001\ue002ab")
    tokenizer.chat_template = "\ue002{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "name": "\ue000", "content": "a\ue001"}]
    ids = encode_prompt(tokenizer, Example("0", messages), chat_template=True)
    assert tokenizer.decode(ids) == "\ue002\ue000a\ue001"


@pytest.mark.parametrize("prompt", ["aZ", [{"role": "system", "content": "b"}, {"role": "user", "content": "<eos>aZ"}]])
def test_messages_with_characters_that_can_not_be_encoded_are_refused(chat, prompt):
    expected = r"prompt 'row-7', as the chat template renders it, has characters that .* cannot encode: \['Z'\]; in '"
    with pytest.raises(DataError, match=expected):
        encode_prompt(chat, Example("row-7", prompt), chat_template=True)
    chat.chat_template = "Z" + TEMPLATE
    with pytest.raises(DataError, match=expected):
        encode_prompt(chat, Example("row-7", "a"), chat_template=True)


def test_a_template_may_write_the_unknown_token(chat):
    chat.chat_template = TEMPLATE.replace("<eos>", "<unk>")
    assert encode_prompt(chat, Example("0", "a"), chat_template=True).count(chat.unk_token_id) == 1
    with pytest.raises(DataError, match=r"prompt 'row-7', .* cannot encode: \['Z'\]"):
        encode_prompt(chat, Example("row-7", "Z"), chat_template=True)


def test_a_text_prompt_through_a_template_is_one_message_of_the_user(chat):
    messages = [{"role": "user", "content": "ab"}]
    text = encode_prompt(chat, Example("0", "ab"), chat_template=True)
    assert text == encode_prompt(chat, Example("0", messages), chat_template=True)
    assert text == chat.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_a_prompt_is_displayed_as_the_model_reads_it_and_without_a_template_by_roles(chat, tokenizer):
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "b=a"}]
    (ids,) = tokenize_prompts(chat, [Example("0", messages)], chat_template=True)
    assert prompt_for_display(chat, messages) == chat.decode(ids)
    assert prompt_for_display(tokenizer, messages) == "system: ab\nuser: b=a"
    assert prompt_for_display(chat, "1+1") == "1+1"


def test_the_alphabet_of_a_dataset_encodes_all_its_texts():
    examples = [
        Example("0", [{"role": "user", "content": "xy"}], answer=42),
        Example("1", "b", demonstration="ab", answer=None),
    ]
    assert characters(examples) == "24abxy"
    assert sorted(ALPHABET) == list(characters([Example("0", ALPHABET)]))


@pytest.mark.parametrize(
    ("example", "chat_template", "text"),
    [
        (Example("row-7", "aZ"), False, r"prompt 'row-7' has characters that tokenizer .* cannot encode: \['Z'\]"),
        (Example("row-7", [{"role": "user", "content": "a"}]), False, "'row-7' .* which need .* with a chat template"),
        (Example("row-7", [{"role": "user", "content": "a"}]), True, "'row-7' .* which need .* with a chat template"),
        (Example("row-7", "a"), True, "'row-7': tokenizer '.*' has no chat template; set data.chat_template=false"),
        (Example("row-7", ""), False, "'row-7' has no tokens"),
    ],
)
def test_prompts_that_can_not_be_encoded_are_named(tokenizer, example, chat_template, text):
    with pytest.raises(DataError, match=text):
        encode_prompt(tokenizer, example, chat_template=chat_template)


def test_messages_for_a_tokenizer_with_a_template_need_the_key_only(chat):
    with pytest.raises(DataError, match=r"^prompt 'row-7' is a list of chat messages; set data.chat_template=true$"):
        encode_prompt(chat, Example("row-7", [{"role": "user", "content": "a"}]), chat_template=False)


def test_a_template_that_rejects_messages_is_named(chat):
    chat.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"'row-7': the chat template of .* rejects it: no system role"):
        encode_prompt(chat, Example("row-7", "a"), chat_template=True)


def test_demonstrations_need_a_text_and_an_end(tokenizer):
    with pytest.raises(DataError, match=r"demonstration of '0' is missing; .*data.completion_column"):
        encode_demonstration(tokenizer, Example("0", "a"))
    endless = character_tokenizer("ab")
    endless.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        encode_demonstration(endless, Example("0", "a", demonstration="b"))


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_alphabets_have_every_character_once(alphabet):
    with pytest.raises(DataError, match="every character once"):
        character_tokenizer(alphabet)
