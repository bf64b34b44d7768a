"""Where the final answer of a response is: after the thinking, in its tags, after `####`, or in the last box."""

import time

import pytest

from rlpack.rewards.answer_part import after_thinking, answer_part, boxes
from rlpack.rewards.functions import has_format
from rlpack.rewards.math import equivalent, final_answer_text


@pytest.mark.parametrize(
    ("completion", "right", "wrong"),
    [
        # The format of `has_format`, whose tags stand directly at the answer.
        ("<think>3 + 4</think> <answer>7</answer>", "7", "4"),
        ("<think>Half of 48 is 24.</think>\n<answer>72</answer>", "72", "24"),
        ("<think>a</think><answer>1/2</answer>", "1/2", "2"),
        ("<think>a</think><answer>-7</answer>", "-7", "7"),
        ("<think>a</think><answer>$5</answer>", "5", "4"),
        ("<think>a</think><answer>1,234</answer>", "1234", "234"),
        (r"<think>a</think><answer>\boxed{3}. No, \boxed{4}</answer>", "4", "3"),
        ("<answer>7", "7", "8"),
        ("<answer>6</answer> No: <answer>7</answer> Done in 8 steps.", "7", "8"),
        # Thinking, which may have answers, boxes and numbers of its own.
        ("<think>maybe the answer is 7. No, 8.</think>\nTherefore there are 8 apples.", "8", "7"),
        ("maybe the answer is 7. No, 8.</think>\nTherefore there are 8 apples.", "8", "7"),
        ("<think>maybe the answer: 7. No, 8.</think>\n#### 8", "8", "7"),
        (r"<think>The final answer is \boxed{7}. Wait, it's 8.</think>The result is \boxed{8}.", "8", "7"),
        ("analysisso 40 after subtracting 16assistantfinal40", "40", "16"),
        # GSM8K.
        ("Ella answered 40 - 4 = <<40-4=36>>36 items correctly. In all she has 24 left.\n#### 24", "24", "40"),
        ("He answered 20 questions.\n#### 80", "80", "20"),
        ("The answer is 7. Wait, no: 3 more. So 10.\n#### 10", "10", "7"),
        ("The answer is 7.\n#### 1,080\n", "1080", "7"),
        ("The answer is 7.\n####$18.50\nI hope this helps.", "18.5", "7"),
        ("The answer is 7.\n#### 18 dollars\n", "18", "7"),
        ("#### 2. Add the numbers\nThe sum of both is 9.", "9", "2"),
        ("#### Step 2\nThe sum of both is 9.", "9", "2"),
        ("#### 8\nThat is " r"\boxed{9}.", "9", "8"),
        # Several boxes.
        (r"first \boxed{3}, so \boxed{5}", "5", "3,5"),
        ("first " r"\boxed{3}" ".\n\nWait, " r"\boxed{5}", "5", "3,5"),
        (r"first $\boxed{3}$, so $\boxed{5}$", "5", "3"),
        (r"$\boxed{3}$ and $\boxed{5}$", "{3, 5}", "5"),
        (r"\boxed{3}, \boxed{4}, and \boxed{5}", "3, 4, 5", "5"),
        (r"\boxed{1}. Hence \boxed{3} or \boxed{5}", "{3, 5}", "{1, 3, 5}"),
        # Characters directly before the number.
        *(
            (f"At first 16. {said}", "34", "16")
            for said in (
                "Answer:34",
                "**Answer:**34",
                "Total:34",
                "答案：34",
                "总共34",
                "(34)",
                '"34"',
                "`34`",
                "*34*",
                "≈34",
            )
        ),
        ("It is (3+4)*2", "14", "2"),
    ],
)
def test_it_is_the_one_that_a_reader_takes_for_it(completion, right, wrong):
    assert equivalent(completion, right) == 1.0
    assert equivalent(completion, wrong) == 0.0


@pytest.mark.parametrize(
    "completion",
    [r"<think>maybe \boxed{7}. Wait", "<think>2 + 5 = 7. So", "<think>The answer is 7", "<think>7</think>"],
)
def test_thinking_alone_has_no_answer(completion):
    assert equivalent(completion, "7") == 0.0
    assert final_answer_text(completion) is None


def test_an_empty_answer_is_none():
    assert equivalent("<think>2+2=4</think><answer></answer>", "4") == 0.0
    assert equivalent("<think>2+2=4</think><answer>C</answer>", "4") == 0.0


def test_a_response_can_have_the_format_and_the_answer_that_the_guide_combines():
    completion = "<think>3 + 4</think> <answer>7</answer>"
    assert (has_format(completion), equivalent(completion, "7")) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        (r"\boxed{1.6\times 10^{-19}}", r"9.1\times 10^{-31}", 0.0),
        (r"\boxed{0.00000012}", "0.00000049", 0.0),
        (r"\boxed{0.0000002}", "0.0000004", 0.0),
        (r"\boxed{\frac{1}{10000000}}", "0.0000002", 0.0),
        (r"\boxed{\frac{1}{10000000}}", "0.0000001", 1.0),
        (r"\boxed{0.333333}", "1/3", 1.0),
        (r"\boxed{0}", "0.0000001", 0.0),
        (r"\boxed{0.0}", "0", 1.0),
        # A dataset's column of numbers has these as Python prints them.
        (r"\boxed{0.00001}", 0.00001, 1.0),
        (r"\boxed{10^{-5}}", 0.00001, 1.0),
        (r"\boxed{e-5}", 0.00001, 0.0),
        (r"\boxed{6.02 \times 10^{23}}", 6.02e23, 1.0),
        (r"\boxed{1.6\times10^{-19}}", 1.6e-19, 1.0),
        (r"\boxed{1e5}", "100000", 1.0),
        (rf"\boxed{{{10**20}}}", str(10**20 + 1), 0.0),
        ("It is 3e8.", "3", 0.0),
        ("It is 3e8.", "300000000", 1.0),
        (r"\boxed{2e}", "2e", 1.0),
    ],
)
def test_small_and_large_numbers_are_compared_by_their_size(said, answer, reward):
    assert equivalent(said, answer) == reward


def test_boxes_are_found_with_braces_and_boxes_in_them():
    text = r"\boxed{\frac{1}{2}} \fbox{\boxed{3}} } \boxed{4"
    assert [text[start:end] for _, start, end in boxes(text)] == [r"\frac{1}{2}", r"\boxed{3}", "4"]


@pytest.mark.parametrize(
    "text",
    ["<think>", "</think>", "<answer>", "#### 1\n", "####", r"\boxed{", r"\boxed{1}", r"\boxed{1},", "{", "}", "\n"],
)
def test_the_time_to_find_it_is_in_proportion_to_the_text(text):
    began = time.process_time()
    text *= 400_000 // len(text)
    answer_part(text)
    after_thinking(text)
    assert time.process_time() - began < 10.0
