import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.rewards.functions import exact_match, final_answer

texts = st.text(st.characters(codec="utf-8", exclude_characters="#"), max_size=8)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("a11#9", "9", 1.0),
        ("a11# 9\n", "9", 1.0),
        ("a11#8#9", "9", 1.0),
        ("a11#9#8", "9", 0.0),
        ("a11#99", "9", 0.0),
        ("a11#9", 9, 1.0),
        ("a11#9", "09", 0.0),
        ("9", "9", 0.0),
        ("", "9", 0.0),
        ("a11#", "9", 0.0),
        ("a11#", "", 1.0),
        ("a11", "", 0.0),
        ("a11#9", None, None),
    ],
)
def test_the_text_after_the_last_marker_has_to_be_the_answer(completion, answer, reward):
    assert final_answer(["p"], [completion], [answer]) == [reward]


@given(before=st.text(max_size=8), answer=texts, other=texts)
@settings(max_examples=60, deadline=None)
def test_any_reasoning_may_stand_before_the_answer(before, answer, other):
    expected = float(other.strip() == answer.strip())
    assert final_answer(["p"] * 2, [f"{before}#{answer}", f"{before}#{other}"], [answer] * 2) == [1.0, expected]


def test_the_marker_may_be_longer():
    assert final_answer(["p"] * 2, ["so #### 7", "so ## 7"], ["7", "7"], marker="####") == [1.0, 0.0]


def test_exact_match_looks_at_the_whole_completion():
    assert exact_match(["p"] * 4, ["2", " 2\n", "2 2", "#2"], ["2", 2, "2", "2"]) == [1.0, 1.0, 0.0, 0.0]
    assert exact_match(["p"], [""], [None]) == [None]
