"""Where the final answer of a response is: after the thinking, in its tags, after `####`, or in the last box."""

import time

import pytest

from rlpack.rewards.answer_notation import normalized
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
        # Thinking, in which there may be answers, boxes and numbers, too.
        ("<think>maybe the answer is 7. No, 8.</think>\nTherefore there are 8 apples.", "8", "7"),
        ("maybe the answer is 7. No, 8.</think>\nTherefore there are 8 apples.", "8", "7"),
        ("<think>maybe the answer: 7. No, 8.</think>\n#### 8", "8", "7"),
        (r"<think>The final answer is \boxed{7}. Wait, it's 8.</think>The result is \boxed{8}.", "8", "7"),
        ("analysisso 40 after subtracting 16assistantfinal40", "40", "16"),
        ("analysisIt is 7?assistantfinalthe answer is 8", "8", "7"),
        ("final40", "40", "4"),
        ("Finally, let me <think> about it. The answer is 7.", "7", "8"),
        ("x</think>The answer is 7.</think>", "7", "8"),
        ("analysis: 4 + 3 is 7", "7", "4"),
        ("<answer>The Great Gatsby</answer>", "The Great Gatsby", "Gatsby"),
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
        (r"#### 2\sqrt{3}", r"2\sqrt{3}", "2"),
        ("#### B", "B", "C"),
        (r"\boxed{34}" "\n\n#### Verification", "34", "2"),
        (r"\boxed{34}" "\n\n#### Method 2", "34", "2"),
        ("The total is **34**.\n\n#### Notes", "34", "2"),
        ("#### 1\nFirst 5.\n#### 2\nThen the sum is 14", "14", "2"),
        ("#### 2.\nThen the sum is 14", "14", "2"),
        # Several boxes.
        *((rf"$\boxed{{3}},{space}\boxed{{4}}$", "3,4", "4") for space in ("\\ ", "\\,", "\\;", "~", "\\quad ")),
        (r"\boxed{3}\ \text{and}\ \boxed{4}", "3,4", "4"),
        (r"\boxed{3}\mbox{ and }\boxed{4}", "3,4", "4"),
        (r"$x=\boxed{3}$ and $y=\boxed{4}$", "3,4", "4"),
        (r"$x_1=\boxed{3}$, $x_2=\boxed{4}$", "3,4", "4"),
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
                "It is (34)",
                '"34"',
                "`34`",
                "*34*",
                "≈34",
            )
        ),
        ("It is (3+4)*2", "14", "2"),
        ("So x=7, which satisfies equations (1) and (2).", "7", "2"),
        ("The total is 7 [1]", "7", "1"),
        ("He has 7 apples. He's in the '90s", "7", "90"),
    ],
)
def test_the_final_answer_is_read_and_earlier_numbers_are_not(completion, right, wrong):
    assert equivalent(completion, right) == 1.0
    assert equivalent(completion, wrong) == 0.0


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        *((said, "3") for said in (r"3\pi", "3:4", "(3, 4)", "[3, 5)", "3, 4", "2x + 3")),
        *((said, "2") for said in (r"2\sqrt{3}", "2:30", "x+2", "x^2", "2*pi", r"\frac{\sqrt{3}}{2}", "1,2,3")),
        *((said, "5") for said in ("5 - 2i", "B", "(B)", "Paris", "no solution", r"10^{-5}")),
        ("**72**", "2"),
        ("$72.", "2"),
        ("18 dollars", "8"),
    ],
)
def test_answers_in_tags_are_read_as_a_whole(said, wrong):
    completion = f"<think>From 4 to 9.</think><answer>{said}</answer>"
    answer = said.strip("*$.")
    assert (equivalent(completion, answer), equivalent(completion, wrong)) == (1.0, 0.0)


def test_a_sentence_in_tags_is_read_like_a_response():
    assert equivalent("<answer>The answer is 7.</answer>", "7") == 1.0
    assert equivalent("<answer>There are 7 of the 9 eggs left, so it is 7</answer>", "7") == 1.0


@pytest.mark.parametrize(
    "completion",
    [r"<think>maybe \boxed{7}. Wait", "<think>2 + 5 = 7. So", "<think>The answer is 7", "analysisThe answer is 7"],
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
        *((rf"\boxed{{{said}}}", answer, 1.0) for said, answer in (("0.016667", "1/60"), ("0.00463", "1/216"))),
        (r"\boxed{0}", "0.0000001", 0.0),
        (r"So $q = 1.6 \times 10^{-19}$", r"9.1 \times 10^{-31}", 0.0),
        (r"\boxed{+\infty}", r"\infty", 1.0),
        *(
            (rf"\boxed{{{said}}}", answer, 1.0)
            for said, answer in (("2e+1", "1+2e"), ("2e-5", "2e - 5"), ("3e - 2", "3e-2"))
        ),
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
    [
        "<think>",
        "</think>",
        "<answer>",
        "#### 1\n",
        "####",
        r"\boxed{",
        r"\boxed{1}",
        r"\boxed{1},",
        "{",
        "}",
        "\n",
        "1e999 ",
        "1.5e40 ",
    ],
)
def test_the_time_to_find_it_is_in_proportion_to_the_text(text):
    began = time.process_time()
    text *= 400_000 // len(text)
    normalized(answer_part(text))
    after_thinking(text)
    assert time.process_time() - began < 10.0
