from typing import Any

import numpy as np
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import offload
from rlpack.batch.ragged import Ragged
from rlpack.batch.store import LocalStore
from rlpack.packing import Batching, make_plan
from rlpack.recipes.driver.loss_weights import planned_response_lengths

# Two sampled segments around a given one; a single response; one that is over the budget by its prompt alone.
MASKS = [[0, 1, 1, 0, 0, 1, 1, 1], [0, 1], [0, 0, 0, 0, 0, 0, 1]]


def batch() -> BatchedDataDict:
    mask = Ragged.from_rows([[bool(token) for token in row] for row in MASKS], torch.bool)
    tokens = mask.with_values(torch.zeros(mask.values.shape, dtype=torch.int64))
    return BatchedDataDict({"input_ids": tokens, "response_mask": mask, "response_lengths": mask.count_nonzero()})


class OnePayloadStore(LocalStore):
    """Reads the payloads of one batch and records which rows were fetched."""

    def __init__(self, payloads: list) -> None:
        self.payloads = payloads
        self.fetched: list[list[int]] = []

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        self.fetched.append(batch.row_ids.tolist())
        local = batch.copy()
        local.reader = lambda handles: [self.payloads[int(str(handle))] for handle in handles]
        return BatchedDataDict(dict(local), row_ids=local.row_ids)


def counts_with(overlong: Any, max_tokens: int) -> tuple[list[int], list[list[int]]]:
    rows = batch()
    offloaded, payloads = offload(rows)
    store = OnePayloadStore(payloads)
    batching = Batching(mode="packed", max_tokens=max_tokens, overlong=overlong)
    plan = make_plan(rows.token_counts(), batching, dp_size=2)
    return planned_response_lengths(offloaded.with_handles(range(9)), plan, store).tolist(), store.fetched


def test_response_tokens_of_several_segments_are_counted_from_the_mask():
    assert counts_with("error", 16) == ([5, 1, 1], [])


def test_response_tokens_of_truncated_rows_are_those_before_the_cut():
    # Six tokens of rows 0 and 2 remain: 0 1 1 0 0 1 and a prompt without its response.
    assert counts_with("truncate", 6) == ([3, 1, 0], [[0, 2]])


def test_dropped_rows_have_no_response_tokens():
    assert counts_with("drop", 7) == ([0, 1, 1], [])


def test_the_counts_of_the_batch_are_left_as_they_are():
    rows = batch()
    plan = make_plan(rows.token_counts(), Batching(mode="packed", max_tokens=6, overlong="truncate"), dp_size=1)
    planned_response_lengths(rows, plan, LocalStore())
    assert np.array_equal(rows["response_lengths"], [5, 1, 1])
