"""Rows that are longer than those that the model was made for."""

import logging
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Data, Model, Rollout
from rlpack.data.examples import Example
from rlpack.data.prompts import Prompts
from rlpack.models.loading import build_meta_model
from rlpack.models.rope import length_limit
from rlpack.recipes.driver.splits import load_splits
from rlpack.recipes.preflight.config_checks import check_before_evaluation, check_before_start
from rlpack.recipes.preflight.length_warnings import length_warnings
from tests.builders import MODEL, tiny_config

SHORT = Model(config=MODEL | {"max_position_embeddings": 32})


def prompts(*lengths):
    examples = [Example(uid=str(number), prompt="a") for number, _ in enumerate(lengths)]
    return Prompts(examples, Ragged.from_rows([[1] * length for length in lengths], torch.int64))


def warnings(response, *splits):
    config = tiny_config(model=SHORT, rollout=Rollout(max_new_tokens=response))
    return length_warnings(config, build_meta_model(SHORT, vocab_size=20, pad_token_id=0), splits)


def test_rows_over_the_positions_are_a_warning_with_the_response_length_that_fits():
    assert warnings(26, prompts(3, 6), prompts(5)) == []
    assert warnings(27, prompts(3), prompts(6)) == [
        "rollout.max_new_tokens is 27: with prompts of up to 6 tokens, rows have up to 33, but the model was made for "
        "32 (max_position_embeddings); lower it to 26 or less"
    ]


def test_prompts_that_leave_no_room_for_a_response_are_a_warning():
    (warning,) = warnings(1, prompts(3, 32))
    assert warning.startswith("prompts have up to 32 tokens, but the model was made for rows of 32 (max_position_emb")
    assert "data.max_prompt_tokens below 32 and data.overlong_prompt=drop" in warning


def test_runs_and_evaluations_warn(caplog):
    data = Data(generator={"train_size": 32, "validation_size": 4}, max_prompt_tokens=64)
    model = Model(config=MODEL | {"max_position_embeddings": 48})
    config = tiny_config(model=model, data=data, rollout=Rollout(max_new_tokens=40))
    tokenizer, train, held_out = load_splits(config)
    for check, splits in ((check_before_start, (train, held_out)), (check_before_evaluation, (held_out,))):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            check(config, tokenizer, *splits)
        assert sum("rollout.max_new_tokens is 40: with prompts" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        (
            {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}},
            512,
        ),
    ],
)
def test_stretched_positions_count(rope: dict[str, Any], limit: int):
    nested = {name: {"rope_theta": 1e4, **value} for name, value in rope.items() if isinstance(value, dict)}
    config = AutoConfig.for_model("llama", max_position_embeddings=64)
    config.rope_parameters = nested or {"rope_theta": 1e4, **rope}
    assert length_limit(config) == ("max_position_embeddings", limit)


def test_the_positions_of_gemma_3_are_those_after_scaling():
    # As for google/gemma-3-4b-it, whose 131,072 positions are its whole context.
    config = AutoConfig.for_model("gemma3_text", max_position_embeddings=131_072)
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    config.rope_parameters = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert length_limit(config) == ("max_position_embeddings", 131_072)
