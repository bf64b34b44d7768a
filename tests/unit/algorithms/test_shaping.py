import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.shaping import informative_rows, soft_overlong_penalty


@pytest.mark.parametrize(("length", "added"), [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0)])
def test_the_punishment_of_length_falls_in_a_line_over_the_buffer(length: int, added: float) -> None:
    result = soft_overlong_penalty(torch.tensor([length]), longest=100, buffer=20, penalty=2.0)
    assert result.tolist() == pytest.approx([added])


def test_without_a_buffer_no_length_is_punished_and_one_over_the_longest_is_refused() -> None:
    assert soft_overlong_penalty(torch.tensor([100]), longest=100, buffer=0).tolist() == [0.0]
    with pytest.raises(AlgorithmError, match=r"dapo\.overlong_buffer\) is 101 of 100 tokens"):
        soft_overlong_penalty(torch.tensor([1]), longest=100, buffer=101)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 4).map(lambda n: n * 7), st.booleans()), max_size=30
    )
)
def test_a_group_is_informative_when_two_of_its_valid_rewards_differ(rows: list[tuple[float, int, bool]]) -> None:
    rewards, groups, valid = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    result = informative_rows(
        torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64), torch.tensor(valid, dtype=torch.bool)
    )
    counted = {group: {r for r, g, v in rows if g == group and v} for group in groups}
    assert result.tolist() == [len(counted[group]) > 1 for group in groups]
