import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged, row_index

ROWS = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)
few = settings(max_examples=60, deadline=None)


def lists(column: Ragged) -> list[list[int]]:
    return [row.tolist() for row in column.rows()]


@few
@given(ROWS, st.data())
def test_select_takes_the_rows_a_list_would_take(rows, data):
    selected = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=9)) if rows else []
    result = Ragged.from_rows(rows, torch.int64).select(selected)
    assert lists(result) == [rows[row] for row in selected]
    assert result.lengths.tolist() == [len(rows[row]) for row in selected]


@few
@given(ROWS, st.integers(0, 3))
def test_padding_and_back_gives_the_same_rows(rows, extra):
    column = Ragged.from_rows(rows, torch.int64)
    width = max(map(len, rows), default=0) + extra
    padded = column.to_padded(-7, width)
    assert padded.tolist() == [row + [-7] * (width - len(row)) for row in rows]
    assert lists(Ragged.from_padded(padded, column.lengths)) == rows


@few
@given(ROWS, st.data())
def test_with_lengths_cuts_and_fills_with_zeros(rows, data):
    lengths = [data.draw(st.integers(0, 7)) for _ in rows]
    column = Ragged.from_rows(rows, torch.int64).with_lengths(torch.tensor(lengths, dtype=torch.int64))
    assert lists(column) == [(row + [0] * 7)[:n] for row, n in zip(rows, lengths, strict=True)]


@few
@given(ROWS, ROWS)
def test_concat_and_repeat_are_those_of_lists(left, right):
    column = Ragged.concat([Ragged.from_rows(left, torch.int64), Ragged.from_rows(right, torch.int64)])
    assert lists(column) == left + right
    assert lists(column.repeat_interleave(2)) == [row for row in left + right for _ in range(2)]
    assert column.segment_ids.tolist() == [i for i, row in enumerate(left + right) for _ in row]
    assert column.offsets.tolist() == np.cumsum([0, *map(len, left + right)]).tolist()


def test_entries_may_have_more_dimensions():
    column = Ragged(torch.arange(6).view(3, 2), torch.tensor([1, 2]))
    assert column.select([1, 0]).values.tolist() == [[2, 3], [4, 5], [0, 1]]
    assert column.to_padded().tolist() == [[[0, 1], [0, 0]], [[2, 3], [4, 5]]]
    assert Ragged.from_padded(column.to_padded(), column.lengths).values.tolist() == column.values.tolist()


def test_rows_in_a_line_are_views():
    column = Ragged.from_rows([[1, 2], [3], [4, 5]], torch.int64)
    assert column.select([1, 2]).values.data_ptr() == column.values[2:].data_ptr()
    assert column[-1].tolist() == [4, 5]
    assert column[1].data_ptr() == column.values[2:].data_ptr()


def test_iteration_yields_the_rows_and_ends_after_the_last():
    column = Ragged.from_rows([[1, 2], [], [3]], torch.int64)
    assert [row.tolist() for row in column] == [[1, 2], [], [3]]
    assert next(iter(column)).data_ptr() == column.values.data_ptr()
    assert [(row.tolist(), number) for row, number in zip(column, range(3), strict=True)][2] == ([3], 2)
    assert list(Ragged.from_rows([], torch.int64)) == []


def test_selecting_keeps_the_graph():
    values = torch.ones(3, requires_grad=True)
    Ragged(values, torch.tensor([2, 1])).select([1, 0, 1]).values.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 2.0]


def test_from_rows_takes_tensors_lists_and_both():
    assert lists(Ragged.from_rows([torch.tensor([1]), torch.tensor([2, 3])])) == [[1], [2, 3]]
    assert Ragged.from_rows([torch.tensor([1]), [2.5]], torch.float32).values.tolist() == [1.0, 2.5]
    assert Ragged.from_rows([], torch.float32).values.dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "lengths", "text"),
    [
        (torch.zeros(3), torch.tensor([1, 1]), "lengths add up to 2 tokens, and values have 3"),
        (torch.zeros(1), torch.tensor([2, -1]), "row 1 has length -1"),
        (torch.zeros(1), torch.tensor([1.0]), "lengths torch.float32"),
        (torch.zeros(1), torch.tensor([1], dtype=torch.int32), "lengths torch.int32"),
        (torch.zeros(()), torch.tensor([1]), "values \\[\\]"),
        ([1], torch.tensor([1]), "values are a list"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(values, lengths, text):
    with pytest.raises(DataError, match=text):
        Ragged(values, lengths)


@pytest.mark.parametrize(
    ("rows", "dtype", "text"),
    [
        ([[1, 2], [1.7, 2.9]], torch.int64, "row 1 has 1.7 and the column is torch.int64"),
        ([[0.0, 1.0]], torch.bool, "row 0 has 0.0 and the column is torch.bool"),
        ([[1], torch.tensor([2.5])], torch.int32, "row 1 has 2.5"),
        ([torch.tensor([2.5])], torch.int64, "rows are torch.float32, the column is torch.int64"),
        ([torch.tensor([1]), torch.tensor([2.5])], None, "row 1 is torch.float32 and row 0 is torch.int64; convert"),
        ([[], [1.0, 70000.0]], torch.float16, r"^row 1 has 70000.0, and the column is torch.float16, .* 65504"),
        ([[70000]], torch.float16, "row 0 has 70000.0, and the column is torch.float16"),
        ([torch.tensor([1.0]), torch.tensor([-70000.0])], torch.float16, "row 1 has -70000.0, and the column is"),
        ([torch.tensor([70000])], torch.float16, "row 0 has 70000, and the column is torch.float16"),
        (
            [torch.tensor([1e39], dtype=torch.float64)],
            torch.float32,
            "row 0 has 1e.39, and the column is torch.float32",
        ),
        ([torch.tensor([1e39j], dtype=torch.complex128)], torch.complex64, "row 0 has 1e.39j, and the column is"),
        ([torch.tensor([1 + 2j])], torch.float32, "rows are torch.complex64, the column is .* no imaginary part"),
        ([[1 + 2j]], torch.float32, "rows can't be converted to torch.float32"),
        ([["a"]], torch.int64, "rows can't be converted to torch.int64"),
        ([[None]], torch.float32, "rows can't be converted to torch.float32"),
        ([[2**70]], torch.int64, "rows can't be converted to torch.int64"),
        ([[1], [[2, 3]]], torch.int64, "rows can't be converted to torch.int64"),
        ([[1], [0, -1]], torch.uint8, "row 1 has -1, and the column is torch.uint8, which holds 0 to 255"),
        ([[1], [2]], torch.bool, "row 1 has 2, and the column is torch.bool, which holds 0 to 1"),
        ([torch.tensor([1, 300])], torch.uint8, "row 0 has 300, and the column is torch.uint8"),
        ([torch.tensor([], dtype=torch.int64), torch.tensor([-1])], torch.uint8, "row 1 has -1, and the column is"),
        ([torch.tensor([[1, 2], [2**31, 3]])], torch.int32, "row 0 has 2147483648, and the column is torch.int32"),
        ([torch.tensor([2**63], dtype=torch.uint64)], torch.int64, "row 0 has 9223372036854775808"),
        ([torch.tensor([True, 2])], torch.bool, "row 0 has 2, and the column is torch.bool"),
    ],
)
def test_values_that_the_type_can_not_hold_are_refused(rows, dtype, text):
    with pytest.raises(DataError, match=text):
        Ragged.from_rows(rows, dtype)


@pytest.mark.parametrize("as_row", [list, torch.tensor])
def test_numbers_are_rounded_and_infinities_stay(as_row):
    inf = float("inf")
    column = Ragged.from_rows([as_row([inf, 2049.0]), as_row([-inf])], torch.float16)
    assert lists(column) == [[inf, 2048.0], [-inf]]
    assert Ragged.from_rows([as_row([16777217])], torch.float32).values.tolist() == [16777216.0]
    assert Ragged.from_rows([as_row([1.5, -2.1])], torch.float8_e5m2).values.float().tolist() == [1.5, -2.0]
    assert Ragged.from_rows([as_row([float("nan")])], torch.float16).values.isnan().all()


def test_an_empty_row_may_be_of_any_dtype():
    column = Ragged.from_rows([torch.tensor([]), torch.tensor([16777217, 2]), torch.tensor([])])
    assert lists(column) == [[], [16777217, 2], []]
    assert Ragged.from_rows([torch.tensor([])], torch.int64).values.dtype == torch.int64


@pytest.mark.parametrize("as_row", [list, torch.tensor])
def test_integers_in_the_range_of_the_type_are_converted(as_row):
    column = Ragged.from_rows([as_row([0, 1]), as_row([1])], torch.bool)
    assert column.values.tolist() == [False, True, True]
    column = Ragged.from_rows([as_row([-128, 127])], torch.int8)
    assert column.values.tolist() == [-128, 127]
    assert column.values.dtype == torch.int8
    assert Ragged.from_rows([as_row([True, False])], torch.uint8).values.tolist() == [1, 0]
    assert Ragged.from_rows([as_row([300, -1])], torch.float32).values.tolist() == [300.0, -1.0]


def test_lengths_are_on_the_device_of_tensor_rows():
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    with torch.device("meta"):  # another default device than that of the rows
        column = Ragged.from_rows(rows)
    assert column.lengths.device == column.values.device
    assert lists(column) == [[1, 2], [3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_lengths_are_whole_numbers(dtype):
    column = Ragged.from_rows([[1, 2], [3]], torch.int64)
    with pytest.raises(DataError, match=f"lengths are {dtype}; they must be integers"):
        Ragged.from_padded(torch.zeros(2, 2), torch.ones(2, dtype=dtype))
    with pytest.raises(DataError, match=f"lengths are {dtype}; they must be integers"):
        column.with_lengths(torch.ones(2, dtype=dtype))


def test_lengths_are_never_negative():
    column = Ragged.from_rows([[1, 2], [3]], torch.int64)
    with pytest.raises(DataError, match="row 1 has length -2; a length is at least 0"):
        column.with_lengths(torch.tensor([1, -2]))


def test_errors_name_what_was_asked_for():
    column = Ragged.from_rows([[1, 2], [3]], torch.int64)
    with pytest.raises(DataError, match="row 2 does not exist; there are 2 rows"):
        column.select([0, 2])
    with pytest.raises(DataError, match="row 0 has 2 tokens, which exceeds the length 1"):
        column.to_padded(length=1)
    with pytest.raises(DataError, match=r"lengths go from 0 to 3; rows have 2"):
        Ragged.from_padded(torch.zeros(2, 2), torch.tensor([0, 3]))
    with pytest.raises(DataError, match=r"padded is \[2, 2\] and lengths are \[3\]"):
        Ragged.from_padded(torch.zeros(2, 2), torch.tensor([0, 1, 1]))
    with pytest.raises(DataError, match="differ in dtype"):
        Ragged.concat([column, column.with_values(torch.zeros(3))])
    with pytest.raises(DataError, match="at least one"):
        Ragged.concat([])
    with pytest.raises(DataError, match="needs a dtype"):
        Ragged.from_rows([])
    with pytest.raises(DataError, match="there are 1 lengths and 2 rows"):
        column.with_lengths(torch.tensor([1]))


def test_rows_are_positions_or_a_mask():
    assert row_index(torch.tensor([True, False, True]), 3).tolist() == [0, 2]
    assert row_index([], 3).tolist() == []
    with pytest.raises(DataError, match="mask has 2 entries for 3 rows"):
        row_index(np.array([True, False]), 3)
    assert row_index((np.True_, False, True), 3).tolist() == [0, 2]
    assert row_index(np.array([2, 0], dtype=np.uint64), 3).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (np.array([1.0]), "rows are float64"),
        ([True, False, 2], "rows mix booleans with numbers; pass integers, or a mask"),
        ([1, np.False_], "rows mix booleans with numbers"),
        ([[0], [1, 2]], "rows can't be read as an array"),
        (torch.ones(2, dtype=torch.bfloat16), "rows can't be read as an array"),
        (np.array([0, 2**64 - 1], dtype=np.uint64), "row 18446744073709551615 does not exist; there are 3 rows"),
        ([2**80], "rows are object"),
        (torch.tensor([0, 1, 1], dtype=torch.uint8), "rows are uint8.*pass bool for a mask, int64 for positions"),
        (np.array([0, 1, 1], dtype=np.uint8), "rows are uint8"),
    ],
)
def test_what_is_no_row_is_refused(rows, text):
    with pytest.raises(DataError, match=text):
        row_index(rows, 3)


@pytest.mark.parametrize("n", [-1, 1.5, True, None])
def test_rows_are_repeated_a_whole_number_of_times(n):
    column = Ragged.from_rows([[1, 2], [3]], torch.int64)
    with pytest.raises(DataError, match=f"n is {n!r}; it must be an integer"):
        column.repeat_interleave(n)


@pytest.mark.parametrize("rows", [[[0, 3, -1], [], [0], [7]], [[], []], []])
def test_nonzero_tokens_are_counted_row_by_row(rows: list[list[int]]):
    expected = [sum(token != 0 for token in row) for row in rows]
    column = Ragged.from_rows(rows, torch.int64)
    for values in (column.values, column.values.float(), column.values != 0):
        counts = column.with_values(values).count_nonzero()
        assert (counts.tolist(), counts.dtype) == (expected, torch.int64)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([torch.ones(2), torch.tensor(1.0)], r"row 1 is a single number; pass a tensor with one entry per token"),
        (
            [torch.ones(0, 7), torch.ones(1, 2), torch.ones(1, 3)],
            r"row 2 has the shape \[1, 3\] and row 1 \[1, 2\]; all dimensions but the first, which counts tokens",
        ),
    ],
)
def test_rows_whose_tokens_have_other_shapes_are_named(rows: list[torch.Tensor], message: str):
    with pytest.raises(DataError, match=message):
        Ragged.from_rows(rows)


def test_a_negative_length_is_named():
    with pytest.raises(DataError, match="length is -5; it has to be at least 0"):
        Ragged.from_rows([], torch.int64).to_padded(length=-5)
