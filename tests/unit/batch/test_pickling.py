import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn

TYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16, torch.bfloat16]


def through_buffers(value, *, read_only=False):
    """Pickle with out-of-band buffers, as Ray does; the result uses the memory of the buffers."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw().toreadonly() if read_only else buffer.raw() for buffer in buffers]
    return pickle.loads(stream, buffers=views), stream, buffers


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("read_only", [False, True])
def test_columns_keep_their_dtype_without_a_warning(dtype, read_only):
    ragged = Ragged(torch.tensor([0, 1, 2]).to(dtype), torch.tensor([2, 0, 1]))
    batch = BatchedDataDict({"ragged": ragged, "dense": torch.ones(3, 2).to(dtype), "list": ["a", None, {"b": 1}]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back, _, _ = through_buffers(batch, read_only=read_only)
    assert back["ragged"].values.dtype == dtype
    assert back["ragged"].values.tolist() == ragged.values.tolist()
    assert back["ragged"].lengths.tolist() == [2, 0, 1]
    assert torch.equal(back["dense"], batch["dense"])
    assert back["list"] == batch["list"]
    assert back.row_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_pickled_out_of_band_and_not_copied(dtype):
    column = Ragged(torch.zeros(100_000, dtype=dtype), torch.tensor([60_000, 40_000]))
    batch = BatchedDataDict({"a": column, "b": torch.zeros(2, 50_000, dtype=dtype)})
    back, stream, buffers = through_buffers(batch, read_only=True)
    assert len(stream) < 2_000
    assert sum(buffer.raw().nbytes for buffer in buffers) < 2 * 100_000 * column.values.element_size() + 1_000
    addresses = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers if buffer.raw().nbytes}
    assert {back["a"].values.data_ptr(), back["b"].data_ptr()} <= addresses


def test_a_view_pickles_its_own_rows_only():
    column = Ragged(torch.zeros(100_000), torch.full((100,), 1_000))
    _, _, buffers = through_buffers(BatchedDataDict({"a": column}).select([3, 4]))
    assert sum(buffer.raw().nbytes for buffer in buffers) < 2 * 1_000 * 4 + 1_000


def test_tensors_keep_the_buffers_alive():
    def arrive():
        return through_buffers(Ragged(torch.arange(50_000), torch.tensor([50_000])), read_only=True)[0]

    columns = [arrive() for _ in range(20)]
    assert all(torch.equal(column.values, torch.arange(50_000)) for column in columns)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol_and_both_copies_work(protocol):
    batch = BatchedDataDict({"a": Ragged.from_rows([[1.0], []], torch.bfloat16), "b": torch.tensor([1, 2])})
    for back in (pickle.loads(pickle.dumps(batch, protocol)), copy.copy(batch), copy.deepcopy(batch)):
        assert back["a"].to_padded().tolist() == [[1.0], [0.0]]
        assert back["b"].tolist() == [1, 2]
    assert copy.copy(batch)["b"] is batch["b"]
    assert copy.deepcopy(batch)["b"].data_ptr() != batch["b"].data_ptr()


def test_a_deep_copy_keeps_devices_gradients_and_the_reader():
    values = torch.ones(3, requires_grad=True)
    lengths = torch.tensor([2, 1])
    rows = {
        "values": Ragged(values, lengths),
        "others": Ragged(torch.zeros(3), lengths),
        "list": [[1], [2]],
        "meta": torch.zeros(2, device="meta"),
    }
    batch = BatchedDataDict(rows, row_ids=[7, 5])
    batch["note"] = RemoteColumn.whole("handle", "note", ["a", "b"])
    batch.reader = lambda handles: [{"note": ["a", "b"]} for _ in handles]
    copied = copy.deepcopy(batch)
    assert copied["meta"].device.type == "meta"
    assert copied["values"].values.requires_grad
    assert copied["values"].values.data_ptr() != values.data_ptr()
    assert copied["values"].lengths is copied["others"].lengths
    assert copied["note"] == ["a", "b"]
    copied["list"][0].append(3)
    assert batch["list"] == [[1], [2]]


def test_a_deep_copy_of_a_shard_has_its_ids_and_plan():
    (shard,) = BatchedDataDict({"place": torch.tensor([1, 2])}, row_ids=[7, 5]).shard_by_batch_size(1)
    copied = copy.deepcopy(shard)
    assert (copied.row_ids.tolist(), copied.has_explicit_ids, copied.plan) == ([7, 5], True, shard.plan)
    assert [view.rows["place"].tolist() for view in copied.microbatches()] == [[1, 2]]


def test_a_deep_copy_has_the_memory_of_its_own_rows_only():
    copied = copy.deepcopy(BatchedDataDict({"a": torch.zeros(100_000)}).select([3, 4]))
    assert copied["a"].untyped_storage().nbytes() == 2 * 4


def test_a_computed_column_is_not_copied_without_its_graph():
    values = 2 * torch.ones(2, requires_grad=True)
    for column in (values, Ragged(values, torch.tensor([1, 1]))):
        with pytest.raises(DataError, match="column 'loss': a tensor on the autograd graph can't be copied; detach"):
            copy.deepcopy(BatchedDataDict({"loss": column}))


def test_empty_batches_and_strided_columns_can_be_pickled():
    empty = BatchedDataDict({"a": Ragged.from_rows([], torch.int64), "b": torch.zeros(0, 3), "c": []})
    back, _, _ = through_buffers(empty, read_only=True)
    assert (back.num_rows, back["a"].num_rows, list(back["b"].shape)) == (0, 0, [0, 3])
    strided = BatchedDataDict({"b": torch.arange(6).view(3, 2).T})
    assert through_buffers(strided)[0]["b"].tolist() == [[0, 2, 4], [1, 3, 5]]


def test_tensors_on_the_autograd_graph_are_refused():
    values = torch.ones(2, requires_grad=True)
    for column in (values, Ragged(values, torch.tensor([1, 1]))):
        with pytest.raises(DataError, match="'loss': a tensor on the autograd graph"):
            pickle.dumps(BatchedDataDict({"loss": column}))


def test_errors_pickle():
    error = pickle.loads(pickle.dumps(DataError("row 3 is blank")))
    assert (type(error), str(error)) == (DataError, "row 3 is blank")
