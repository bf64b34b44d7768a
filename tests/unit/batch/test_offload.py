import pickle

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.offload import offload, offload_size, select_rows
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn


def rows(count: int = 3, *, scale: int = 1) -> BatchedDataDict:
    tokens = Ragged(torch.arange(4 * scale * count), torch.full((count,), 4 * scale))
    columns = {
        "input_ids": tokens,
        "logprobs": tokens.with_values(tokens.values.float()),
        "rewards": torch.zeros(count),
        "uid": [f"row {row}" for row in range(count)],
        "completion": [str(row) * scale for row in range(count)],
    }
    return BatchedDataDict(columns, row_ids=np.arange(count)[::-1])


def test_the_stub_of_a_batch_grows_with_its_rows_and_not_with_its_tokens():
    sizes = [len(pickle.dumps(offload(rows(64, scale=scale))[0])) for scale in (1, 16)]
    assert sizes[1] <= 1.01 * sizes[0]
    assert offload_size(rows(64, scale=16)) > 10 * offload_size(rows(64))


def test_names_and_per_row_numbers_stay_in_the_stub_tokens_and_texts_are_offloaded():
    batch = rows()
    offloaded, payloads = offload(batch)
    assert [name for name in offloaded.stub if isinstance(offloaded.stub[name], RemoteColumn)] == [
        "input_ids",
        "logprobs",
        "completion",
    ]
    assert [list(payload) for payload in payloads] == [["input_ids", "logprobs"], ["completion"]]
    assert offloaded.sizes[0] == 12 * 8 + 12 * 4 + 2 * 3 * 8
    assert offloaded.stub.row_ids.tolist() == [2, 1, 0]
    restored = offloaded.with_handles(["tokens", "texts"])
    restored.reader = lambda handles: [{"tokens": payloads[0], "texts": payloads[1]}[str(handle)] for handle in handles]
    assert torch.equal(restored["logprobs"].values, batch["logprobs"].values)
    assert restored["completion"] == batch["completion"]


def test_a_batch_of_per_row_numbers_has_no_payloads():
    offloaded, payloads = offload(rows().keep(["rewards", "uid"]))
    assert (payloads, offloaded.sizes, offload_size(offloaded.stub)) == ([], [], 0)


def test_the_stub_of_a_batch_does_not_grow_with_the_width_of_a_column():
    def wide(width: int) -> BatchedDataDict:
        return BatchedDataDict({"scores": torch.ones(64, width), "rewards": torch.ones(64)})

    sizes = [len(pickle.dumps(offload(wide(width))[0])) for width in (2, 2048)]
    assert sizes[1] <= 1.01 * sizes[0]
    assert offload_size(wide(2048)) - offload_size(wide(2)) == 64 * 4 * 2046
    offloaded, payloads = offload(wide(3))
    assert (str(offloaded.stub["scores"]), [list(payload) for payload in payloads]) == (
        "RemoteColumn(float32, 64 rows in 1 payloads)",
        [["scores"]],
    )
    with pytest.raises(DataError, match=r"column 'scores' is remote: .*; fetch it first"):
        offloaded.stub.dense("scores")


def test_columns_that_cannot_be_pickled_are_named():
    with pytest.raises(DataError, match=r"column .judge. can't be pickled: .*; use texts and numbers"):
        offload(BatchedDataDict({"judge": [lambda: None]}))


def test_rows_are_selected_from_a_payload():
    _, payloads = offload(rows())
    result = select_rows(payloads[0], {"input_ids": np.array([2, 0])})
    assert list(result) == ["input_ids"]
    assert result["input_ids"].values.tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


def test_columns_that_cannot_be_offloaded_are_named():
    batch = rows()
    tokens = batch["logprobs"]
    batch["logprobs"] = tokens.with_values(tokens.values.clone().requires_grad_())
    with pytest.raises(DataError, match=r"column 'logprobs': .*autograd graph"):
        offload(batch)
    remote = offload(rows())[0].stub
    with pytest.raises(DataError, match="column 'input_ids' is remote already"):
        offload(remote)
