import logging

import numpy as np
import pytest

from rlpack.batch.errors import DataError
from rlpack.data.examples import Example, PromptDataset
from rlpack.data.prompts import Prompts, tokenize_dataset
from rlpack.data.tokenization import character_tokenizer

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


def test_the_fingerprint_changes_with_the_data():
    fingerprints = {prompts().fingerprint, prompts(4, "drop").fingerprint}
    changed = PromptDataset("sums", [*EXAMPLES[:2], Example("c", "1230=", answer="7")])
    other = tokenize_dataset(changed, TOKENIZER, chat_template=False, max_tokens=5, overlong="error")
    assert len(fingerprints | {other.fingerprint}) == 3
    assert prompts().fingerprint in fingerprints
