import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.rewards.functions import exact_match, extracted_answer, final_answer, has_format, matches

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
def test_the_text_after_the_last_marker_is_compared_with_the_answer(completion, answer, reward):
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


@pytest.mark.parametrize(
    ("completion", "whole", "reward"),
    [("a 42", False, 1.0), ("a 42", True, 0.0), ("42", True, 1.0), ("", False, 0.0), ("a\n4\n2", False, 1.0)],
)
def test_a_regular_expression_is_found_or_matches_the_whole(completion, whole, reward):
    assert matches(completion, pattern=r"\d.?\d", whole=whole) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("<a>3</a><a>\n4 </a>", 4, 1.0),
        ("<a>4</a><a>3</a>", "4", 0.0),
        ("4", "4", 0.0),
        ("<a></a>", "", 1.0),
        ("<a>4</a>", None, None),
    ],
)
def test_the_group_of_the_last_match_is_compared_with_the_answer(completion, answer, reward):
    assert extracted_answer(completion, answer, pattern="<a>(.*?)</a>") == reward


def test_without_a_group_all_of_the_match_is_compared():
    assert extracted_answer("1 and 23", "23", pattern=r"\d+") == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>a\nb</think>\n\n<answer></answer> ", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think>x<answer>b</answer>", 0.0),
        ("x<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>x", 0.0),
        ("<think><think>a</think></think><answer>b</answer>", 0.0),
        ("<think>a<answer></think>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_a_format_is_its_sections_in_order_each_once_and_nothing_between(completion, reward):
    assert has_format(completion) == reward


def test_the_sections_of_a_format_have_any_names():
    assert has_format("<plan>a</plan>", tags=["plan"]) == 1.0
    assert has_format("<think>a</think><answer>b</answer>", tags=["plan"]) == 0.0
    assert has_format("<plan>a</plan>", tags="plan") == 1.0
    assert has_format("<p></p><l></l><a></a><n></n>", tags="plan") == 0.0
