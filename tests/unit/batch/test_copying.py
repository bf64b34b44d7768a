import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.batch import copying
from rlpack.batch.ragged import Ragged

DTYPES = [torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize("compiled", [True, False])
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12), width=st.sampled_from([None, 1, 3]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_run_is_copied_completely_to_its_goal(
    compiled: bool, sizes: list[int], width: int | None, data: st.DataObject
) -> None:
    copier = copying._copier() if compiled else copying._copy_by_numpy
    dtype = data.draw(st.sampled_from(DTYPES))
    order = torch.tensor(data.draw(st.permutations(range(len(sizes)))))
    shape = (sum(sizes),) if width is None else (sum(sizes), width)
    values = torch.randint(0, 2, shape).to(dtype)
    lengths = torch.tensor(sizes)
    rows = list(values.split(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_copier", lambda: copier)
        patch.setattr(copying, "_SMALL_BYTES", 0)
        patch.setattr(copying, "_THREAD_BYTES", data.draw(st.sampled_from([4, 2**30])))
        result = Ragged(values, lengths).select(order)
    assert torch.equal(result.values, torch.cat([rows[row] for row in order.tolist()]))
    assert result.lengths.tolist() == lengths[order].tolist()


def test_a_run_outside_of_its_column_is_refused_before_memory_is_touched() -> None:
    source, target = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    for start, goal, length in ((3, 0, 2), (0, 3, 2), (-1, 0, 1), (0, 0, -1), (0, -1, 1)):
        with pytest.raises(IndexError, match="outside of its column"):
            copying.copy_runs(source, target, *(torch.tensor([value]) for value in (start, goal, length)))
    assert not target.any()


def test_tensors_with_gradients_are_gathered_by_torch() -> None:
    values = torch.arange(3.0, requires_grad=True)
    Ragged(values, torch.tensor([1, 2])).select(np.array([1, 0])).values.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 1]


def test_a_column_of_one_token_may_have_any_stride() -> None:
    values = torch.arange(8.0).view(1, 8)[:, 3]
    result = Ragged(values, torch.tensor([1, 0])).select([1, 0])
    assert (result.values.tolist(), result.lengths.tolist()) == ([3.0], [0, 1])
