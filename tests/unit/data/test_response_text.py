from rlpack.data.response_text import response_text
from tests.unit.data.test_turn_end import chat_tokenizer


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = chat_tokenizer(None)
    ids = tokenizer.encode("<start>final<end>abc<end>", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert response_text(tokenizer, ids, None) == "finalabc"
    assert response_text(tokenizer, ids, {end}) == "<start>final<end>abc"
    assert response_text(tokenizer, ids[:-1], {end}) == "<start>final<end>abc"  # a response that was cut off
    assert response_text(tokenizer, [], {end}) == ""
