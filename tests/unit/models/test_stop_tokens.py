import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Data, Model, Rollout
from rlpack.models.errors import ModelError
from rlpack.models.stop_tokens import own_stop_token_ids, stop_token_ids
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import SamplingParams
from tests.builders import tiny_config
from tests.unit.data.test_turn_end import GEMMA, chat_tokenizer
from tests.unit.rollout.builders import VOCABULARY, decoder


def model_of(folder: Path, generation_config: Any) -> Model:
    (folder / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return Model(path=str(folder))


@pytest.mark.parametrize(
    ("given", "added"),
    [({"eos_token_id": [1, 6]}, (6,)), ({"eos_token_id": 6}, (6,)), ({"eos_token_id": None}, ()), ({}, ())],
)
def test_responses_also_end_at_the_ids_of_the_base_models_generation_config(tmp_path: Path, given: Any, added: Any):
    config = tiny_config(model=model_of(tmp_path, given), rollout=Rollout(stop_token_ids=(5,)))
    assert stop_token_ids(config, chat_tokenizer(None)) == (5, 1, *added)


def test_without_a_generation_config_the_tokenizers_end_and_the_configured_ids_end_a_response(tmp_path: Path):
    for model in (Model(path=str(tmp_path)), Model()):
        config = tiny_config(model=model, rollout=Rollout(stop_token_ids=(5,)))
        assert stop_token_ids(config, chat_tokenizer(GEMMA)) == (5, 1)


def test_the_end_of_a_templates_turn_ends_a_response_where_the_template_is_used(tmp_path: Path):
    tokenizer = chat_tokenizer(GEMMA)
    end = tokenizer.convert_tokens_to_ids("<end>")
    config = tiny_config(model=Model(path=str(tmp_path)), data=Data(chat_template=True))
    assert (own_stop_token_ids(config, tokenizer), stop_token_ids(config, tokenizer)) == ((end,), (end, 1))


@pytest.mark.parametrize(
    "given", [{"eos_token_id": "1"}, {"eos_token_id": [1, -1]}, {"eos_token_id": True}, [1]]
)  # the last is no object
def test_an_id_that_is_none_is_an_error_that_names_the_file(tmp_path: Path, given: Any):
    config = tiny_config(model=model_of(tmp_path, given))
    with pytest.raises(ModelError, match=r"model\.path is '.*', whose generation_config\.json "):
        stop_token_ids(config, chat_tokenizer(None))


def test_a_generation_config_that_is_no_json_is_an_error(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"whose generation_config\.json can't be read: .*; copy or download"):
        stop_token_ids(tiny_config(model=Model(path=str(tmp_path))), chat_tokenizer(None))


def test_a_generated_response_ends_at_the_base_models_end_of_a_turn(tmp_path: Path):
    prompt, seeds = Ragged.from_rows([[5, 3]], torch.int64), np.array([7], dtype=np.uint64)
    engine = HFEngine(decoder())
    (free,) = engine.generate(prompt, SamplingParams(max_new_tokens=9), seeds).token_ids.rows()
    third = free.tolist()[2]
    config = tiny_config(model=model_of(tmp_path, {"eos_token_id": [VOCABULARY + 9, third]}))
    tokenizer = chat_tokenizer(None)
    tokenizer.eos_token = None
    stops = stop_token_ids(config, tokenizer)  # the first is not the model's, and never sampled
    responses = engine.generate(prompt, SamplingParams(max_new_tokens=9, stop_token_ids=stops), seeds)
    assert responses.token_ids.values.tolist() == free[: free.tolist().index(third) + 1].tolist()
    assert [*responses.finish_reasons] == ["stop"]
