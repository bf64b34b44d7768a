import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpack.rewards.functions import exact_match, extracted_answer, final_answer
from rlpack.rewards.math import equivalent
from rlpack.rewards.voted_answers import answer_reader, majority

TEXTS = st.text("12#= \n", max_size=8)


def reader_of(name, **arguments):
    return answer_reader([(f"rlpack.rewards.{name}", arguments)])


@given(TEXTS, TEXTS.map(str.strip))
def test_a_response_is_rewarded_exactly_if_its_answer_is_the_reference(response, answer):
    cases = {
        reader_of("functions:final_answer").read(response): final_answer([""], [response], [answer])[0],
        reader_of("functions:final_answer", marker="=").read(response): final_answer(
            [""], [response], [answer], marker="="
        )[0],
    }
    for read, reward in cases.items():
        assert (read == answer) == (reward == 1.0)
    assert (reader_of("functions:exact_match").read(response) == answer) == (
        exact_match([""], [response], [answer])[0] == 1.0
    )
    for pattern in ("#(.*?)=", "[12]+", "(1)|2"):
        read = reader_of("functions:extracted_answer", pattern=pattern).read(response)
        assert (read == answer) == (extracted_answer(response, answer, pattern=pattern) == 1.0)


def test_equivalent_mathematics_is_one_answer():
    read = reader_of("math:equivalent").read
    responses = [r"It is $\frac{2}{4}$.", "It is 0.5", r"\boxed{1/2}", r"\boxed{x + 1}", r"\boxed{1 + x}", "none"]
    answers = [read(response) for response in responses]
    assert answers[0] == answers[1] == answers[2] != answers[3] == answers[4]
    assert answers[5] is None
    assert equivalent(responses[0], "0.5") == equivalent(responses[1], "0.5") == 1.0


@pytest.mark.parametrize(
    ("answer", "one", "other", "wrong"),
    [
        (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}", r"\frac12"),
        ("5", "5", "x=5", "6"),
        ("50", "50", r"50\%", "60"),
        ("1024", "1024", "2^{10}", "512"),
        (r"2\sqrt3", r"2\sqrt{3}", r"\sqrt{12}", "3"),
        ("10000", "10000", r"10\,000", "0"),
        ("HHT", "HHT", r"\text{HHT}", "THH"),
        ("18", "18 dollars", r"\$18", "1"),
    ],
)
def test_an_answer_that_is_written_in_two_ways_wins_over_one_that_is_rarer(answer, one, other, wrong):
    responses = [rf"\boxed{{{said}}}" for said in (one, other, wrong, one, other, wrong, wrong)]
    vote = majority([reader_of("math:equivalent").read(response) for response in responses])
    assert vote.rows == (0, 1, 3, 4)
    assert [equivalent(response, answer) for response in responses] == [1, 1, 0, 1, 1, 0, 0]


def test_the_first_function_that_defines_an_answer_decides_and_others_leave_the_exact_text():
    several = [
        ("mine:score", {}),
        ("rlpack.rewards.functions:has_format", {}),
        ("rlpack.rewards.functions:exact_match", {}),
    ]
    assert "exact_match" in answer_reader(several).description
    other = answer_reader(several[:2])
    assert (other.description, other.is_extracted, other.read(" a ")) == ("exact text", False, " a ")


@pytest.mark.parametrize(
    ("answers", "rows"),
    [
        (["a", "b", "a"], (0, 2)),
        (["a", "b"], (0, 1)),
        (["a", "b", "b", "a", "c"], (0, 1, 2, 3)),
        ([None, None, "c"], (2,)),
        ([None, None], (0, 1)),
        (["a"], (0,)),
    ],
)
def test_a_majority_is_all_responses_with_a_most_frequent_answer(answers, rows):
    assert majority(answers).rows == rows
