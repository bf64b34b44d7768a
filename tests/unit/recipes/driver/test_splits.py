import json
import logging

import numpy as np
import pytest
import torch

from rlpack.batch.errors import DataError
from rlpack.batch.offload import offload_size
from rlpack.batch.ragged import Ragged
from rlpack.batch.store import LocalStore
from rlpack.config.schema import Config, Data, Evaluation, EvaluationSet, SFTWarmup
from rlpack.data.examples import Example
from rlpack.data.prompts import Prompts
from rlpack.data.tokenization import character_tokenizer
from rlpack.recipes.driver.splits import cache_splits, load_sets, load_splits
from rlpack.startup.dataset_checks import check_datasets
from tests.builders import tiny_config

WORKED = [{"prompt": f"{n}+1=", "answer": str(n + 1), "worked": f"{n}+1={n + 1}"} for n in range(32)]
BARE = [{"prompt": row["prompt"], "answer": row["answer"]} for row in WORKED[:4]]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path):
    source, held_out = write(tmp_path / "train.jsonl", WORKED), write(tmp_path / "test.jsonl", BARE)
    return Data(source=source, validation_source=held_out, completion_column="worked")


def with_recipe(data: Data, **sections) -> Config:
    return tiny_config(data=data, sft_warmup=SFTWarmup(steps=2), **sections)


class SmallStore(LocalStore):
    """Has a large budget, and little room on the driver's node."""

    budget = 1e12

    def __init__(self, limit: float) -> None:
        self.limit, self.num_permanent = limit, 0

    def offload_limit(self) -> float:
        return self.limit

    def offload_permanently(self, batch):
        self.num_permanent += 1
        return batch


def test_datasets_are_cached_within_a_quarter_of_the_room_of_the_drivers_node():
    prompts = Prompts([Example(str(n), "1=") for n in range(40)], Ragged.from_rows([[1]] * 40, torch.int64))
    size = offload_size(prompts.batch(np.arange(40)))
    stores = [SmallStore(limit) for limit in (4 * size - 4, 4 * size)]
    for store in stores:
        (split,) = cache_splits(store, character_tokenizer("1="), prompts)
        assert split.batch(np.array([39, 2]))["uid"] == ["39", "2"]
    assert [store.num_permanent for store in stores] == [0, 1]


def test_a_warm_up_needs_demonstrations_only_to_train(data):
    config = with_recipe(data, evaluation=Evaluation(sets={"bare": EvaluationSet(source=data.validation_source)}))
    check_datasets(config)
    tokenizer, train, held_out = load_splits(config)
    assert [example.demonstration for example in train.examples] == [row["worked"] for row in WORKED]
    assert [example.demonstration for example in held_out.examples] == [None] * 4
    assert [example.answer for example in load_sets(config, tokenizer)["bare"].examples] == ["1", "2", "3", "4"]


def test_demonstrations_of_held_out_prompts_are_read_if_there_are_any(data):
    same = data.model_copy(update={"validation_source": data.source})
    held_out = load_splits(with_recipe(same))[2]
    assert [example.demonstration for example in held_out.examples] == [row["worked"] for row in WORKED]


@pytest.mark.parametrize("load", [check_datasets, load_splits])
def test_answers_are_needed_only_where_responses_are_generated(data, tmp_path, load):
    rows = [{"prompt": row["prompt"], "worked": row["worked"]} for row in WORKED]
    source = write(tmp_path / "bare.jsonl", rows)
    without = data.model_copy(update={"source": source, "validation_source": source})
    load(tiny_config("sft", data=without))
    with pytest.raises(DataError, match=r"'answer'; it has prompt, worked; set data.answer_column, or data.answer_col"):
        load(with_recipe(without))


@pytest.mark.parametrize("load", [check_datasets, load_splits])
def test_a_missing_column_of_demonstrations_is_named(data, load):
    swapped = data.model_copy(update={"source": data.validation_source, "validation_source": data.source})
    with pytest.raises(DataError, match=r"test.jsonl:1 has no column 'worked'; .* or choose data=js"):
        load(with_recipe(swapped))
    with pytest.raises(DataError, match=r"test.jsonl:1 has no column 'worked'; .* set data.completion_column"):
        load(tiny_config("sft", data=data))


@pytest.mark.parametrize(
    ("columns", "answer_column", "left_out", "answer"),
    [
        ({"prompt": "old", "answer": "why"}, "label", "answer, prompt", "2"),
        ({"prompt": "old", "answer": "why"}, None, "prompt", "why"),
        ({"logprobs": 1, "answer": "why"}, "label", "answer, logprobs", "2"),
        ({"level": 1}, "label", None, "2"),
    ],
)
def test_columns_that_rewards_never_see_are_named(tmp_path, caplog, columns, answer_column, left_out, answer):
    source = write(tmp_path / "rows.jsonl", [{"question": "1+1=", "label": "2", **columns}])
    data = Data(source=source, validation_source=source, prompt_column="question", answer_column=answer_column)
    with caplog.at_level(logging.WARNING):
        prompts = load_splits(tiny_config(data=data))[1]
    said = {record.getMessage().partition(", because")[0] for record in caplog.records}
    assert said == ({f"{source}: the columns {left_out} are left out"} if left_out else set())
    batch = prompts.batch(np.array([0]))
    assert (batch["prompt"], batch["answer"]) == (["1+1="], [answer])
    assert "logprobs" not in batch
