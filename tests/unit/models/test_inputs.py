import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.batch.batch import BatchedDataDict, MicrobatchView
from rlpack.batch.ragged import Ragged
from rlpack.models.inputs import ModelInputs, pack_rows, to_model_inputs
from rlpack.models.policy import Policy
from rlpack.packing.analysis.layouts import Layout, packed_layout, padded_layout
from tests.unit.models.tiny import pad_rows, tiny_model, tiny_rows


def view_of(rows: list[torch.Tensor], layout: Layout) -> MicrobatchView:
    batch = BatchedDataDict({"input_ids": Ragged.from_rows(rows, torch.int64)})
    return MicrobatchView(rows=batch, layout=layout, is_dummy=not rows, index=np.arange(len(rows)))


def inputs_of(rows: list[torch.Tensor], layout: Layout) -> ModelInputs:
    return to_model_inputs(view_of(rows, layout), device="cpu", pad_token_id=52)


def test_packed_rows_are_contiguous_with_alignment_and_padding():
    inputs = inputs_of([torch.tensor([5, 6, 7]), torch.tensor([8])], packed_layout([3, 1], pad_to_multiple=2, length=8))
    assert inputs.input_ids.tolist() == [[5, 6, 7, 52, 8, 52, 52, 52]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 2, 0, 1, 0, 1]]
    assert inputs.packed is not None
    assert inputs.packed.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert inputs.slots.tolist() == [0, 1, 2, 4]
    assert inputs.row_lengths.tolist() == [3, 1]
    assert inputs.has_context().tolist() == [False, True, True, False]


def test_slots_that_round_a_row_up_have_no_position_that_its_sequences_have_not(monkeypatch):
    monkeypatch.setattr("rlpack.models.inputs.rounded_rows", lambda count: 13)
    inputs = inputs_of([torch.tensor([5, 6, 7]), torch.tensor([8])], packed_layout([3, 1]))
    assert inputs.input_ids.tolist() == [[5, 6, 7, 8] + [52] * 9]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, *[0, 1, 2] * 3]]
    assert inputs.packed is not None
    assert inputs.packed.lengths == (3, 1, 3, 3, 3)
    assert inputs.slots.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("multiple", "length"), [(48, None), (1, 200)])
def test_padding_of_packed_rows_has_no_position_beyond_those_of_a_model(multiple: int, length: int | None):
    policy, rows = Policy(tiny_model("gpt2", n_positions=60)).eval(), tiny_rows([60, 11])
    alone = torch.cat([policy(pack_rows([row])).logprobs for row in rows])
    packed = policy(inputs_of(rows, packed_layout([60, 11], pad_to_multiple=multiple, length=length))).logprobs
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


def test_padded_rows_have_one_row_each():
    inputs = inputs_of([torch.tensor([5, 6, 7]), torch.tensor([8])], padded_layout([3, 1], 4))
    assert inputs.input_ids.tolist() == [[5, 6, 7, 52], [8, 52, 52, 52]]
    assert inputs.packed is None
    assert inputs.slots.tolist() == [0, 1, 2, 4]


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    multiple=st.sampled_from([1, 4]),
    tail=st.integers(0, 5),
)
def test_every_layout_gives_the_scores_of_the_rows_alone(lengths: list[int], multiple: int, tail: int):
    policy, rows = Policy(tiny_model("mistral")), tiny_rows(lengths)
    needed = sum(-(-length // multiple) * multiple for length in lengths)
    layouts = [
        packed_layout(lengths, pad_to_multiple=multiple, length=needed + tail),
        padded_layout(lengths, max(lengths, default=0) + tail),
    ]
    expected = policy(pad_rows(rows, width=12)).logprobs if rows else torch.zeros(0, dtype=torch.float64)
    for layout in layouts:
        found = policy(inputs_of(rows, layout)).logprobs
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", [packed_layout([], length=4), padded_layout([], 4)])
def test_a_dummy_microbatch_has_slots_and_no_tokens(layout: Layout):
    inputs = inputs_of([], layout)
    assert inputs.input_ids.tolist() == [[52] * 4]
    assert inputs.num_tokens == inputs.row_lengths.shape[0] == 0


def test_moving_to_a_device_changes_no_value():
    inputs = pack_rows(tiny_rows([3, 2]))
    moved = inputs.to("cpu")
    assert torch.equal(moved.input_ids, inputs.input_ids)
    assert moved.packed is not None
    assert moved.packed.lengths == (3, 2)
